"""Narrow weights that no training made: random ones, round to nearest, to measure a format without a checkpoint.

Formats that `kog quantize` writes are made as it makes them (quantizing.py). Others, whose groups are along K:

    offsets   scale = (max w - min w) / (codes - 1); codes count from the minimum, or about a zero point
    E2M1      scale = 2^(exponent of max |w|, less 2)    (OCP Microscaling Formats 1.0, section 6.3)
"""

import torch

from kog_triton.checkpoint.narrow import Bring, NarrowTensor, as_it_is
from kog_triton.checkpoint.quantizing import quantize
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import ModelError
from kog_triton.model.spec import ModelSpec
from kog_triton.model.weight_format import E2M1_MAGNITUDES, Code, Offset, Scale, WeightFormat

Tensor = torch.Tensor
_DTYPES = {Scale.F32: torch.float32, Scale.BF16: torch.bfloat16, Scale.F16: torch.float16}


def nearest(weight: Tensor, how: WeightFormat) -> NarrowTensor:
    """A weight [..., rows, cols] in any of the formats; ModelError if a group does not divide."""
    if how.offset is Offset.NONE and how.code is not Code.E2M1:
        return quantize(weight, how)
    if reason := how.undivided(weight.shape[-1]):
        raise ModelError(reason)
    groups = weight.float().unflatten(-1, (-1, how.group_cols))
    codes, scales, offsets = _e2m1(groups) if how.code is Code.E2M1 else _about(groups, how)
    return NarrowTensor(how, codes.flatten(-2), scales, offsets)


def _e2m1(groups: Tensor) -> tuple[Tensor, Tensor, None]:
    exponents = torch.frexp(groups.abs().amax(-1)).exponent.clamp(-124, 127) - 3
    values = torch.ldexp(groups, -exponents[..., None])
    levels = torch.tensor(E2M1_MAGNITUDES, device=groups.device)
    between = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(values.abs(), between) + 8 * (values < 0)
    return codes.to(torch.uint8), (exponents + 127).to(torch.uint8), None


def _about(groups: Tensor, how: WeightFormat) -> tuple[Tensor, Tensor, Tensor]:
    least, largest = groups.amin(-1), groups.amax(-1)
    top = (1 << how.code.bits) - 1
    scales = ((largest - least) / top).to(_DTYPES[how.scale])
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    step = scales.float()
    if how.offset is Offset.MINIMUM:
        offsets = least.to(scales.dtype)
        codes = (groups - offsets.float()[..., None]).div_(step[..., None]).round_().clamp_(0, top)
        return codes.to(torch.uint8), scales, offsets
    points = (-least / step).round_().clamp_(0, top)
    codes = (groups / step[..., None]).add_(points[..., None]).round_().clamp_(0, top)
    if how.code is Code.INT8:
        return (codes - 128).to(torch.int8), scales, (points - 128).to(torch.int8)
    return codes.to(torch.uint8), scales, points.to(torch.uint8)


class NarrowRandomWeights:
    """A `WeightSource` of the random weights of `spec`, of which those that `spec.narrow` names are stored narrow.

    `narrow` gives them as they are stored, `load` their values, float32. Made anew at each call, on `device`.
    """

    def __init__(self, spec: ModelSpec, seed: int = 0, device: str | torch.device = "cpu") -> None:
        self.spec = spec
        self._wide = RandomWeights(spec, seed, device)
        self._formats = dict(spec.narrow)

    def narrow(self, name: str, bring: Bring = as_it_is) -> NarrowTensor:
        return nearest(self._wide.load(name), self._formats[name]).moved(bring)

    def load(self, name: str) -> torch.Tensor:
        return self.narrow(name).unpack() if name in self._formats else self._wide.load(name)
