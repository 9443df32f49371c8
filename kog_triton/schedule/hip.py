"""The HIP monokernel's lowering: the CUDA kernel's stream, cut so that weights go straight to registers (docs/HIP.md).

A warp is half a wave, and 16 of them multiply, so a unit, its parts of K and its rows are cut as for CUDA. What is not
there is a ring in LDS: a fragment of all warps, 16 bytes a thread, is the only step of the stream.
"""

from dataclasses import dataclass, replace

from kog_triton.errors import ModelError
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import WARPS, CudaLowering, cut_stages, shifted
from kog_triton.schedule.cuda_weights import FRAGMENT_ROWS
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.schedule import Schedule
from kog_triton.schedule.topology import Gpu

FRAG_K, FRAGMENTS = 32, 1  # 16 bytes a thread; no two fragments have to come together
THREADS = WARPS * 32  # a block's: eight waves, two a SIMD, with 256 registers each


@dataclass(frozen=True)
class HipLowering(CudaLowering):
    """A lowering whose weights pass through no memory of the block."""

    @property
    def ring_slots(self) -> int:  # type: ignore[override]
        return 0

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return True

    @property
    def least_ring_slots(self) -> int:  # type: ignore[override]
        return 0


def lower_hip(schedule: Schedule, gpu: Gpu, num_blocks: int = 0) -> HipLowering:
    """The lowering of a schedule for an AMD GPU. ModelError names what the kernel cannot do."""
    spec = schedule.spec
    if spec.dtype is DType.F32:
        raise ModelError("the hip backend reads 16-bit weights: choose --dtype bf16 or fp16")
    if spec.narrow:
        raise ModelError("the hip backend reads 16-bit weights, and these are narrow")
    group = (num_blocks or gpu.num_blocks) // schedule.shards_per_rank
    group = max(1, min(group, -(-spec.hidden_size // FRAGMENT_ROWS)))
    blocks = group * schedule.shards_per_rank
    tilings = cut_stages(schedule, FRAG_K, FRAGMENTS, blocks)
    if tilings is None:
        raise ModelError(f"hidden_size {spec.hidden_size} cannot be cut for the hip backend")
    lowering = HipLowering(schedule, blocks, tilings, gpu, FRAG_K, FRAGMENTS)
    unknown = [s.name for s in matrix_stages(schedule) if lowering.weights[s.name].pack != 1]
    assert not unknown, unknown
    return replace(lowering, tilings=shifted(lowering))
