"""Narrow weights in 16 bits, ahead of the products of prompts: the kernel's argument, header and buffer (unpack.cu)."""

import ctypes

from kog_triton.backends.cuda.layout.batches import THREADS
from kog_triton.backends.cuda.layout.header import render_weights
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import MMA_ROWS, WARPS, CudaLowering
from kog_triton.schedule.cuda_weights import StreamWeights
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.schedule import Stage


class UnpackCall(ctypes.Structure):
    """kog::Unpack (include/kog/prompt/unpack.h)."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("arena", "fragments", "row_scales", "out")),
        *((n, ctypes.c_int) for n in ("unit_fragments", "shard_units", "rows", "parts")),
    )


def render_unpack(weights: StreamWeights, dtype: DType) -> str:
    """The header of unpack.cu."""
    lines = [
        f"namespace kog {{ constexpr int kConsumers = {THREADS}; }}",
        "#include <kog/ptx.h>",
        "namespace kog {",
        f"constexpr int kUnpackBytes = {ctypes.sizeof(UnpackCall)};",
        f"constexpr int kWarps = {WARPS}, kFragK = {weights.frag_k};",
        f"constexpr bool kF16 = {str(dtype is DType.F16).lower()};",
        f"constexpr bool kRowScales = {str(weights.row_scales).lower()};",
        *render_weights({"Weights": weights}),
        "}  // namespace kog",
        "",
    ]
    return "\n".join(lines)


def wide_fragment_bytes(lo: CudaLowering) -> int:
    """Of one fragment of all warps in 16 bits."""
    return WARPS * MMA_ROWS * lo.frag_k * 2


def wide_fragments(lo: CudaLowering, stage: Stage) -> int:
    """Those of a stage's matrices, of all shards."""
    return lo.schedule.num_shards * lo.num_units(stage) * lo.steps(stage)


def unpacked_bytes(lo: CudaLowering) -> int:
    """Of the buffer for one stage of a layer, the largest; 0 for a model of 16-bit weights."""
    if not lo.schedule.spec.narrow:
        return 0
    most = max(wide_fragments(lo, stage) for stage in layer_matrices(lo.schedule))
    return most * wide_fragment_bytes(lo)
