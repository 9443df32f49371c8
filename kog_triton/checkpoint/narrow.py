"""A weight as a narrow checkpoint stores it: codes, scales and what is beside them, in one form for all formats.

`WeightFormat` says what they mean. Codes lie one a byte, in the order of the matrix, whatever the file packs: a reader
of this form, such as a backend's packing, needs to know no file format. `unpack` is the definition of the weight's
value, in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kog_triton.errors import ModelError
from kog_triton.model.weight_format import Code, Offset, Scale, WeightFormat, e2m1_in_half

Tensor = torch.Tensor
SCALES = {torch.float32: Scale.F32, torch.bfloat16: Scale.BF16, torch.float16: Scale.F16, torch.uint8: Scale.E8M0}
LARGEST = {Code.E4M3: 448.0, Code.INT8: 128.0, Code.UINT4: 8.0, Code.E2M1: 6.0}  # of a code
Bring = Callable[[Tensor], Tensor]  # gives a tensor as it is elsewhere
SYMMETRIC = 8  # what a UINT4 code is less where there are no zero points


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class NarrowTensor:
    """One matrix, or one a lane, of `format`.

    codes    [..., rows, cols], uint8, or int8 for INT8; the bits of E4M3 and E2M1 as they are
    scales   [..., row groups, column groups], of the type that `format.scale` says; E8M0 as uint8
    offsets  of the scales' shape: zero points (uint8, int8 for INT8) or minimums (as the scales), None without
    """

    format: WeightFormat
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None

    def __post_init__(self) -> None:
        """ModelError if the parts do not fit each other or a scale is not finite: a damaged checkpoint."""
        *lanes, rows, cols = self.codes.shape
        grid = (*lanes, *self.format.grid(rows, cols))
        offsets = self.scales if self.offsets is None else self.offsets
        if tuple(self.scales.shape) != grid or tuple(offsets.shape) != grid:
            raise ModelError(f"scales have shape {list(self.scales.shape)}, not {list(grid)}")
        if SCALES.get(self.scales.dtype) is not self.format.scale:
            raise ModelError(f"scales are {self.scales.dtype}, not {self.format.scale.name}")
        if (self.offsets is None) is not (self.format.offset is Offset.NONE):
            raise ModelError("zero points or minimums do not go with the format")
        scales = self.scale_values()
        if not bool(torch.isfinite(scales).all()):
            raise ModelError("a scale is not finite")
        largest = LARGEST[self.format.code] * (2 if self.format.offset is Offset.ZERO_POINT else 1)
        if not bool(torch.isfinite(scales * largest).all()):
            raise ModelError("a scale is so large that float32 does not hold its weights")
        if self.format.offset is Offset.MINIMUM and not bool(torch.isfinite(offsets).all()):
            raise ModelError("a minimum is not finite")
        if self.format.code is Code.E4M3 and bool(((self.codes & 0x7F) == 0x7F).any()):
            raise ModelError("a weight is NaN")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def scale_values(self) -> Tensor:
        """Scales as float32, exactly."""
        if self.format.scale is not Scale.E8M0:
            return self.scales.float()
        exponents = self.scales.double() - 127
        return torch.where(self.scales == 255, torch.nan, torch.exp2(exponents)).float()

    def unpack(self) -> Tensor:
        """The weights, float32 [..., rows, cols]; every operation rounds to float32 once."""
        values = code_values(self.format.code, self.codes)
        if self.format.offset is Offset.ZERO_POINT:
            assert self.offsets is not None
            values -= self._spread(self.offsets.float())
        elif self.format.code is Code.UINT4 and self.format.offset is Offset.NONE:
            values -= SYMMETRIC
        values *= self._spread(self.scale_values())
        if self.format.offset is Offset.MINIMUM:
            assert self.offsets is not None
            values += self._spread(self.offsets.float())
        return values

    def moved(self, move: Bring) -> "NarrowTensor":
        """This weight with each of its tensors as `move` gives it elsewhere."""
        offsets = None if self.offsets is None else move(self.offsets)
        return replace(self, codes=move(self.codes), scales=move(self.scales), offsets=offsets)

    def reshape(self, shape: tuple[int, ...]) -> "NarrowTensor":
        """With other leading dimensions; rows and columns stay."""
        lead = shape[:-2]
        offsets = self.offsets
        if offsets is not None:
            offsets = offsets.reshape(*lead, *offsets.shape[-2:])
        scales = self.scales.reshape(*lead, *self.scales.shape[-2:])
        return NarrowTensor(self.format, self.codes.reshape(shape), scales, offsets)

    def take_rows(self, order: Tensor) -> "NarrowTensor":
        """The rows at the indices `order`, in that order; ModelError if rows share a scale with some others."""
        if self.format.group_rows > 1:
            raise ModelError(f"rows of {self.format.name} weights share scales: they keep their order")
        per_row = self.format.group_rows == 1
        scales = self.scales[..., order, :] if per_row else self.scales
        offsets = self.offsets
        if offsets is not None and per_row:
            offsets = offsets[..., order, :]
        return NarrowTensor(self.format, self.codes[..., order, :], scales, offsets)

    def cut(self, rows: slice, cols: slice) -> "NarrowTensor":
        """Some rows and columns: what one shard, or one slice of K, multiplies with.

        A cut lies at a group's edge or at the matrix's; ModelError otherwise, since a group would get two scales.
        """
        parts = []
        for part, size, group in (
            (rows, self.shape[-2], self.format.group_rows),
            (cols, self.shape[-1], self.format.group_cols),
        ):
            first, last, step = part.indices(size)
            for edge in (first, last):
                if step != 1 or (edge % (group or size) and edge != size):
                    raise ModelError(
                        f"{self.format.name} weights are not cut at {edge} of {size}:"
                        f" scales are shared by {group or size}"
                    )
            group = group or size
            parts.append((slice(first, last), slice(first // group, -(-last // group))))
        (rows, down), (cols, across) = parts
        offsets = None if self.offsets is None else self.offsets[..., down, across]
        return NarrowTensor(self.format, self.codes[..., rows, cols], self.scales[..., down, across], offsets)

    def _spread(self, groups: Tensor) -> Tensor:
        """A value a group as a value a weight; broadcast where one group is all."""
        rows, cols = self.shape[-2:]
        high, wide = self.format.group_rows, self.format.group_cols
        if high > 1 and groups.shape[-2] > 1:
            groups = _repeat(groups.mT, high).mT[..., :rows, :]
        if wide > 1 and groups.shape[-1] > 1:
            groups = _repeat(groups, wide)[..., :cols]
        return groups


def _repeat(values: Tensor, times: int) -> Tensor:
    """Each value of the last dimension `times` times; `repeat_interleave` takes several times as long."""
    return values[..., None].expand(*values.shape, times).flatten(-2)


def code_values(code: Code, codes: Tensor) -> Tensor:
    """What codes stand for, float32, before zero points and scales; a new tensor."""
    if code is Code.E4M3:
        return codes.view(torch.float8_e4m3fn).float()
    if code is Code.E2M1:
        return e2m1_in_half(codes.to(torch.int16)).view(torch.float16).float() * 2**14
    return codes.float()
