"""The baseline of torch_graph.py with torch's own products of narrow weights: int4 and FP8.

    int4   torch._weight_int4pack_mm: bf16 activations, groups along K, scales and zeros of bf16
    FP8    torch._scaled_mm: activations quantised to FP8 in the graph, by row for weights with a scale a row, by
           1 x 128 for weights in blocks of 128 x 128

What stays wide, such as the head, is multiplied as torch_graph.py does.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kog_triton.bench.peers import Setting
from kog_triton.bench.peers.torch_graph import Linear, PlainDecoder, TorchGraph, WideLinear
from kog_triton.checkpoint.narrow import SYMMETRIC, NarrowTensor
from kog_triton.model.spec import DType, ModelSpec, pattern_of
from kog_triton.model.weight_format import Code, Offset, WeightFormat

Tensor = torch.Tensor
_E4M3 = torch.float8_e4m3fn
_BLOCK = 128  # weights and activations that share a scale, in FP8 blocks
# What cuBLAS wants of FP8 in blocks: rows of x in fours, and columns in fours of blocks (section "Element 1D and
# 128x128 2D Block Scaling for FP8 Data Types" of its guide).
_FOURS = 4
_INT4_GROUPS = (32, 64, 128, 256)  # those that _weight_int4pack_mm takes
_INNER_K_TILES = 8  # of its packing: tiles of 16 columns that one load brings, the most that it knows


def why_not(how: WeightFormat, cols: int) -> str:
    """Why torch has no product of such weights of so many columns, "" if it has."""
    if how.code is Code.UINT4 and how.group_rows == 1 and how.group_cols in _INT4_GROUPS:
        return "" if how.offset is not Offset.MINIMUM else "torch's int4 product has zero points, not minimums"
    if how.code is Code.E4M3 and (how.group_rows, how.group_cols) == (1, 0):
        return ""
    if how.code is Code.E4M3 and (how.group_rows, how.group_cols) == (_BLOCK, _BLOCK):
        whole = cols % (_FOURS * _BLOCK) == 0
        return "" if whole else f"torch's product of FP8 blocks takes fours of them, not {cols} columns"
    return f"torch has no product of {how.name} weights"


def join_rows(parts: Sequence[NarrowTensor]) -> NarrowTensor:
    """The rows [rows, columns] of several matrices of one format under each other; each ends with a whole group."""
    first = parts[0]
    offsets = None if first.offsets is None else torch.cat([p.offsets for p in parts if p.offsets is not None])
    return NarrowTensor(
        first.format, torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts]), offsets
    )


class Int4Linear:
    """By torch's int4 product: W = (code - 8) * scale + zero, scale and zero of bf16, one a group."""

    def __init__(self, weight: NarrowTensor, bias: Tensor | None) -> None:
        how, codes = weight.format, weight.codes
        self._group, self._bias = how.group_cols, bias
        self._on_cpu = codes.device.type == "cpu"
        if self._on_cpu:
            self._packed = torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        else:
            pairs = codes[:, ::2] << 4 | codes[:, 1::2]
            self._packed = torch._convert_weight_to_int4pack(pairs.contiguous(), _INNER_K_TILES)
        scales = weight.scale_values()
        zeros = torch.zeros_like(scales)
        if weight.offsets is not None:
            zeros = (SYMMETRIC - weight.offsets.float()) * scales
        self._scales = torch.stack([scales, zeros], -1).transpose(0, 1).contiguous().bfloat16()
        self.nbytes = self._packed.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        product = torch._weight_int4pack_mm_for_cpu if self._on_cpu else torch._weight_int4pack_mm
        out: Tensor = product(x, self._packed, self._group, self._scales)
        return out if self._bias is None else out + self._bias


class Fp8Linear:
    """By torch's scaled product of FP8; x is quantised so that the largest of a row, or of 128 of it, is 448."""

    def __init__(self, weight: NarrowTensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.codes.view(_E4M3).T, bias
        self._blocks = weight.format.group_cols == _BLOCK
        # the library wants a scale a row as [1, rows], those of blocks as [column blocks, row blocks], rows first
        self._scales = weight.scale_values().T
        self.nbytes = weight.codes.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % _FOURS)) if self._blocks else x
        groups = rows.float().unflatten(-1, (-1, _BLOCK if self._blocks else x.shape[-1]))
        scales = groups.abs().amax(-1).clamp(min=1e-12) / torch.finfo(_E4M3).max
        codes = (groups / scales[..., None]).flatten(-2).to(_E4M3)
        if self._blocks:
            scales = scales.T.contiguous().T  # the library wants those of one column of blocks beside each other
        out = torch._scaled_mm(codes, self._weight, scale_a=scales, scale_b=self._scales, out_dtype=x.dtype)[: len(x)]
        return out if self._bias is None else out + self._bias


class TorchNarrow(TorchGraph):
    name = "torch-narrow"
    how = "CUDA graph of plain torch with its own narrow products"
    ran = "this adapter has run on a CPU, its step uncaptured"

    @staticmethod
    def absent(setting: Setting) -> str:
        spec: ModelSpec = setting.weights.spec
        if not spec.narrow:
            return "it is for narrow weights: --weights"
        if spec.dtype is not DType.BF16:
            return "torch's narrow products give bf16"
        reasons = [why_not(how, spec.shapes[pattern_of(name)][-1]) for name, how in spec.narrow]
        return TorchGraph.absent(setting) or next(filter(None, reasons), "")

    def open(self, setting: Setting) -> tuple[ModelSpec, PlainDecoder]:
        source: Any = setting.weights  # of narrow weights it has `narrow`
        formats = dict(source.spec.narrow)

        def bring(tensor: Tensor) -> Tensor:
            return tensor.to(setting.device)

        def make_linear(names: Sequence[str], bias: Tensor | None) -> Linear:
            if names[0] not in formats:
                wide = [source.load(name)[0].to(setting.device, torch.bfloat16) for name in names]
                return WideLinear(torch.cat(wide), bias)
            parts = [source.narrow(name, bring) for name in names]
            rows = join_rows([part.reshape(part.shape[-2:]) for part in parts])
            linear = Int4Linear if rows.format.code is Code.UINT4 else Fp8Linear
            return linear(rows, bias)

        decoder = PlainDecoder(source, setting.device, setting.max_context, make_linear)
        return setting.weights.spec, decoder
