"""Narrow weights in 16 bits, ahead of the products of prompts: the kernel's argument, header and buffer (unpack.cu)."""

import ctypes
from collections.abc import Sequence

from kog_triton.backends.cuda.layout.batches import THREADS
from kog_triton.backends.cuda.layout.header import render_weights
from kog_triton.backends.cuda.layout.prompt import takes
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
    """Those of a stage's matrices, of a rank's shards."""
    return lo.schedule.shards_per_rank * lo.num_units(stage) * lo.steps(stage)


def unpacked_stages(lo: CudaLowering) -> tuple[Stage, ...]:
    """A narrow model's stages that the products' kernels do not read (layout/prompt.py)."""
    if not lo.schedule.spec.narrow:
        return ()
    return tuple(s for s in layer_matrices(lo.schedule) if not takes(lo, s))


def unpacked_bytes(lo: CudaLowering, stages: Sequence[Stage]) -> int:
    """Of the buffer for one stage of a layer, the largest of these."""
    return max((wide_fragments(lo, stage) for stage in stages), default=0) * wide_fragment_bytes(lo)
