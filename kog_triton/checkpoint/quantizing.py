"""Wide weights made narrow: round to nearest, symmetric, a scale a group from its largest magnitude.

    FP8         scale = max |w| / 448                  code = nearest e4m3 of w / scale
    int8, int4  scale = max |w| / (2^bits - 1) * 2     code = round(w / scale), within -2^(bits - 1) .. 2^(bits - 1) - 1

Scales are rounded to their stored type first, so that a code is the nearest one under the scale that readers use. A
block of FP8 at an edge counts as padded with zeros. Sources: DeepSeek-V3's weight_quant for blocks, compressed-tensors'
calculate_qparams for integers; tests compare with the package.
"""

import torch

from kog_triton.checkpoint.narrow import SYMMETRIC, NarrowTensor
from kog_triton.errors import ModelError
from kog_triton.model.weight_format import Code, Offset, Scale, WeightFormat

Tensor = torch.Tensor
E4M3_MAX = 448.0
_DTYPES = {Scale.F32: torch.float32, Scale.BF16: torch.bfloat16, Scale.F16: torch.float16}
_SLICE = 1 << 24  # weights that are quantized at a time: bounds the temporary float32 copies


def quantize(weight: Tensor, how: WeightFormat) -> NarrowTensor:
    """A weight [..., rows, cols] in the format `how`, which has no offsets; ModelError if a group does not divide."""
    if how.offset is not Offset.NONE or how.code is Code.E2M1 or how.scale not in _DTYPES:
        raise ModelError(f"weights are not made {how.name}")
    rows, cols = weight.shape[-2:]
    if reason := how.undivided(cols):
        raise ModelError(reason)
    step = max(how.group_rows or rows, 1)
    step *= max(1, _SLICE // (step * cols * max(1, weight.numel() // (rows * cols))))
    parts = [_quantize(weight[..., i : i + step, :].float(), how) for i in range(0, rows, step)]
    codes, scales = (torch.cat(some, -2) for some in zip(*parts, strict=True))
    return NarrowTensor(how, codes, scales)


def _quantize(w: Tensor, how: WeightFormat) -> tuple[Tensor, Tensor]:
    """(codes, scales) of some rows, float32."""
    *lanes, rows, cols = w.shape
    down, across = how.grid(rows, cols)
    high, wide = how.group_rows or rows, how.group_cols or cols
    edges = (0, across * wide - cols, 0, down * high - rows)
    padded = torch.nn.functional.pad(w, edges) if any(edges) else w
    groups = padded.reshape(*lanes, down, high, across, wide)
    largest = torch.maximum(groups.amax((-3, -1)), -groups.amin((-3, -1)))
    half = (1 << how.code.bits - 1) - 0.5
    scales = largest / (E4M3_MAX if how.code is Code.E4M3 else half)
    scales = torch.where(largest == 0, 1.0, scales).to(_DTYPES[how.scale])
    scales.clamp_min_(torch.finfo(scales.dtype).tiny)
    values = groups / scales.float()[..., :, None, :, None]
    values = values.reshape(padded.shape)[..., :rows, :cols]
    if how.code is Code.E4M3:
        codes = values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes, scales
    values = values.round_().clamp_(-half - 0.5, half - 0.5)
    if how.code is Code.INT8:
        return values.to(torch.int8), scales
    return values.add_(SYMMETRIC).to(torch.uint8), scales
