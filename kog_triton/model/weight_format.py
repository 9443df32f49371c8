"""How a narrow weight is stored, as data: what a code stands for, and which weights share a scale.

    W[r, c] = (value(code[r, c]) - zero_point[g]) * scale[g] + minimum[g]      g: the group of (r, c)

A format has zero points (whole numbers, in units of a code), or minimums (in units of the weight), or neither. This is
the one description that checkpoints of every kind are read into (checkpoint/narrow.py holds the numbers), and that
packing and backends read. No torch, no numpy, no device.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Code(IntEnum):
    """What the bits of a code stand for."""

    E4M3 = 0  # 8 bits: sign, 4 of exponent, 3 of mantissa; no infinity (OCP FP8, float8_e4m3fn)
    INT8 = 1  # 8 bits, two's complement
    UINT4 = 2  # 0..15, less the zero point; less 8 where the format has none
    E2M1 = 3  # 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign (OCP MX FP4)

    @property
    def bits(self) -> int:
        return 8 if self in (Code.E4M3, Code.INT8) else 4


# What E2M1's codes without a sign stand for (OCP Microscaling Formats 1.0, section 5.3.3).
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_in_half(codes: Any) -> Any:
    """Bits of the float16 that is 2^-14 times what E2M1's codes stand for: arrays or tensors of int16.

    No table of values: a CUDA graph that is being recorded can copy none to its GPU.
    """
    return (codes & 8) << 12 | (codes & 7) << 9


class Scale(IntEnum):
    """How a scale is stored."""

    F32 = 0
    BF16 = 1
    F16 = 2
    E8M0 = 3  # a byte e that stands for 2^(e - 127) (OCP MX)

    @property
    def bits(self) -> int:
        return {Scale.F32: 32, Scale.E8M0: 8}.get(self, 16)


class Offset(IntEnum):
    """What is beside a scale."""

    NONE = 0
    ZERO_POINT = 1  # as wide as a code
    MINIMUM = 2  # as wide as a scale


@dataclass(frozen=True)
class WeightFormat:
    """The format of one matrix. A group is `group_rows` x `group_cols` weights; 0 stands for all rows or columns.

    (1, 0) is one scale a row (per channel), (0, 0) one for all (per tensor), (128, 128) FP8's blocks, (1, 32) groups
    of 32 along K. Groups begin at row and column 0; the last ones may be smaller.
    """

    code: Code
    group_rows: int
    group_cols: int
    scale: Scale
    offset: Offset = Offset.NONE

    @property
    def name(self) -> str:
        """For people: "int4 g128", "fp8 128x128", "int8 channel", "mxfp4"."""
        kind = {Code.E4M3: "fp8", Code.INT8: "int8", Code.UINT4: "int4", Code.E2M1: "fp4"}[self.code]
        if self.code is Code.E2M1 and self.scale is Scale.E8M0 and self.group_cols == 32:
            return "mxfp4"
        if self.group_rows == 1:
            return f"{kind} g{self.group_cols}" if self.group_cols else f"{kind} channel"
        if not self.group_rows and not self.group_cols:
            return f"{kind} tensor"
        return f"{kind} {self.group_rows or 'all'}x{self.group_cols or 'all'}"

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """How many groups a matrix has along its rows and columns."""
        return -(-rows // (self.group_rows or rows)), -(-cols // (self.group_cols or cols))

    def undivided(self, cols: int) -> str:
        """Why a row of so many columns has no whole groups, "" if it has; blocks of rows may go over the edge."""
        if self.group_rows != 1 or not self.group_cols or cols % self.group_cols == 0:
            return ""
        return f"{cols} columns do not divide into groups of {self.group_cols}"

    def bytes(self, rows: int, cols: int) -> int:
        """Bytes of one matrix: codes, scales and what is beside them."""
        down, across = self.grid(rows, cols)
        beside = {Offset.NONE: 0, Offset.ZERO_POINT: self.code.bits, Offset.MINIMUM: self.scale.bits}
        bits = rows * cols * self.code.bits + down * across * (self.scale.bits + beside[self.offset])
        return -(-bits // 8)


# Those that have a name on a command line: `kog plan --format`, `kog bench --weights`.
FORMATS = {
    "fp8-block": WeightFormat(Code.E4M3, 128, 128, Scale.F32),
    "fp8-channel": WeightFormat(Code.E4M3, 1, 0, Scale.F32),
    "int8-channel": WeightFormat(Code.INT8, 1, 0, Scale.BF16),
    "int4-g32": WeightFormat(Code.UINT4, 1, 32, Scale.BF16),
    "int4-g64": WeightFormat(Code.UINT4, 1, 64, Scale.BF16),
    "int4-g128": WeightFormat(Code.UINT4, 1, 128, Scale.BF16),
    "mxfp4": WeightFormat(Code.E2M1, 1, 32, Scale.E8M0),
    "int4-g128-zp": WeightFormat(Code.UINT4, 1, 128, Scale.F16, Offset.ZERO_POINT),  # as AWQ has it
    "q8_0": WeightFormat(Code.INT8, 1, 32, Scale.F16),  # GGUF's
    "q4_0": WeightFormat(Code.UINT4, 1, 32, Scale.F16),
    "q4_1": WeightFormat(Code.UINT4, 1, 32, Scale.F16, Offset.MINIMUM),
}
# Those that `kog quantize` writes: checkpoints of compressed-tensors, without offsets.
WRITTEN = ("fp8-block", "fp8-channel", "int8-channel", "int4-g32", "int4-g64", "int4-g128")
