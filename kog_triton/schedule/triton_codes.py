"""Narrow weights in the Triton lowering: how the codes of one tile lie, and its scales behind them.

    tile   [tile_rows, lines, threads, 4] words of codes | [warps, groups, rows of each] scales | likewise zero points

A stored word is `pack` words of 16-bit weights: the codes of as many neighbors along K, the first in the lowest bits. A
thread reads four words of each line of a row, which are a run of K: [threads, lines, 4] in its order. Rows go to warps
in turns. Whole numbers have a sign: of 4 bits 8 is taken off, and off their zero points. A group is what shares a scale
within one row of a tile; scales and zero points are float32, whatever the checkpoint stores. A minimum is stored as the
zero point that gives it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kog_triton.errors import ModelError
from kog_triton.model.weight_format import Code, Offset
from kog_triton.schedule.cuda_weights import stage_format
from kog_triton.schedule.schedule import Op, Schedule, Stage

LEAST_GROUP = 32  # values of K: a thread's codes of one load share a scale
ALIGNED = 4  # words, at which every tile begins


@dataclass(frozen=True)
class TileShape:
    """How a tile of codes is read: rows, of which `warps` have each one or some; lines of a row; threads of a line;
    words in all, what fills the tile up too."""

    rows: int
    warps: int
    lines: int
    threads: int
    words: int


@dataclass(frozen=True)
class TileCodes:
    """Of one stage. `group`: values of K that share a scale, a power of two; 0 where a row has one."""

    code: Code
    group: int
    zero_points: bool

    @property
    def pack(self) -> int:
        """Words of 16-bit weights in a stored one."""
        return 16 // self.code.bits

    @property
    def is_e4m3(self) -> bool:
        return self.code is Code.E4M3

    @property
    def zero(self) -> int:
        """What a stored whole number is less than the checkpoint's, and so is its zero point."""
        return 8 if self.code is Code.UINT4 else 0

    @property
    def is_e2m1(self) -> bool:
        return self.code is Code.E2M1

    @property
    def lift(self) -> int:
        """How many times as large as what a code stands for the byte is that the kernel multiplies: whole numbers of 4
        bits stand high in it, and E2M1 has halves."""
        return {Code.UINT4: 16, Code.E2M1: 2}.get(self.code, 1)

    def groups(self, width: int) -> int:
        """Of one row of a tile of `width` words of 16-bit weights."""
        return max(1, 2 * width // self.group) if self.group else 1

    def words(self, rows: int, width: int) -> int:
        """Stored words of such a tile, scales and all."""
        beside = self.groups(width) * (2 if self.zero_points else 1)
        return -(-rows * (width // self.pack + beside) // ALIGNED) * ALIGNED


def tile_codes(schedule: Schedule, stage: Stage) -> TileCodes | None:
    """None for 16 bits; ModelError where a stage's weights are not all of one format."""
    how = stage_format(schedule, stage)
    if how is None:
        return None
    return TileCodes(how.code, how.group_cols, how.offset is not Offset.NONE)


def unreadable_codes(schedule: Schedule) -> str:
    """Why the Triton kernel does not read a model's narrow weights, "" if it does."""
    spec = schedule.spec
    if spec.narrow and spec.num_lanes > 1:
        return "it reads narrow weights of plain models alone"
    for _, how in spec.narrow:
        if how.offset and how.code in (Code.E4M3, Code.E2M1):
            return f"it reads zero points and minimums of whole numbers alone, not of {how.name}"
        whole = how.group_cols & (how.group_cols - 1) == 0 and how.group_cols >= LEAST_GROUP
        if how.group_cols and not whole:
            return f"it reads groups of a power of two from {LEAST_GROUP} on, not {how.name}"
    try:
        for _, stage in schedule.walk():
            if stage.op is Op.MATVEC:
                stage_format(schedule, stage)
    except ModelError as error:
        return str(error)
    return ""


def pack_codes(codes: TileCodes, values: Any, shape: TileShape, join: Callable[[list[Any]], Any]) -> Any:
    """A tile's bytes [n, words of it * 4], uint8, of `values`: codes, scales and zero points of n tiles.

    codes   [n, rows, values of a row] uint8     scales, zero points   [n, rows, groups * 4], float32 as bytes
    """
    stored, *beside = values
    count = stored.shape[0]
    if codes.pack == 4:
        stored = stored ^ codes.zero  # less 8, in 4 bits
        stored = stored[..., 0::2] | stored[..., 1::2] << 4
    runs = stored.reshape(count, shape.rows, shape.threads, shape.lines, 16)
    parts = [runs.swapaxes(2, 3).reshape(count, -1)]
    for of_rows in beside:
        by_warp = of_rows.reshape(count, shape.rows // shape.warps, shape.warps, -1, 4)
        parts.append(by_warp.swapaxes(1, 2).swapaxes(2, 3).reshape(count, -1))
    size = sum(part.shape[1] for part in parts)
    rest = 4 * shape.words - size
    return join([*parts, parts[0][:, :1].repeat(1, rest)] if rest else parts)


def unpack_codes(codes: TileCodes, stored: Any, shape: TileShape, groups: int) -> list[Any]:
    """Codes, scales and zero points as `pack_codes` laid them out: of tiles' words [n, words] as bytes, codes
    [n, rows, bytes of a row], still `pack`ed, and the others [n, rows, groups, 4]."""
    count, size = stored.shape[0], 16 * shape.rows * shape.threads * shape.lines
    runs = stored[:, :size].reshape(count, shape.rows, shape.lines, shape.threads, 16)
    parts = [runs.swapaxes(2, 3).reshape(count, shape.rows, -1)]
    for _ in range(2 if codes.zero_points else 1):
        end = size + 4 * shape.rows * groups
        by_warp = stored[:, size:end].reshape(count, shape.warps, groups, -1, 4)
        parts.append(by_warp.swapaxes(2, 3).swapaxes(1, 2).reshape(count, shape.rows, groups, 4))
        size = end
    return parts
