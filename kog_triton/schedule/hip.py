"""The HIP monokernel's lowering: the CUDA kernel's stream, cut so that weights go straight to registers (docs/HIP.md).

A warp is half a wave, and 16 of them multiply, so a unit, its parts of K and its rows are cut as for CUDA. What is not
there is a ring in LDS: a fragment of all warps, 16 bytes a thread, is the only step of the stream.
"""

from dataclasses import dataclass, replace

from kog_triton.errors import ModelError, RequestError
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


@dataclass(frozen=True)
class Die:
    """What an XCD works on where every XCD has as many workgroups: the kernel looks at every launch who lies where, and
    deals out blocks in this order (include/kog/place.h).

    base   its IOD, of two XCDs each, if XCC_IDs are counted IOD by IOD, which AMD does not promise
    lanes  of which it has blocks; kv_heads: whose caches it reads, of one lane
    """

    number: int
    base: int
    blocks: range
    lanes: range
    kv_heads: range


def place_blocks(lowering: HipLowering) -> list[Die]:
    """Every XCD of the GPU that has blocks."""
    gpu, schedule, count = lowering.gpu, lowering.schedule, lowering.num_blocks
    group = count // schedule.shards_per_rank
    splits = max(1, group // schedule.shard_kv_heads)
    dies = min(gpu.dies, count)
    out = []
    for d in range(dies):
        blocks = range(d * count // dies, (d + 1) * count // dies)
        first, last = blocks[0], blocks[-1]
        lanes = range(first // group, last // group + 1)
        of_lane = (first % group, last % group) if len(lanes) == 1 else (0, group - 1)
        most = schedule.shard_kv_heads
        heads = range(min(of_lane[0] // splits, most), min(of_lane[1] // splits + 1, most))
        out.append(Die(d, d // 2, blocks, lanes, heads))
    return out


def asked_blocks(schedule: Schedule, gpu: Gpu, asked: int) -> int:
    """What is asked for, of each GPU; 0 is the usual number. RequestError for what a lowering would not have."""
    lanes = schedule.shards_per_rank
    most = lanes * min(_most_of_lane(schedule), gpu.num_sms // lanes)
    of = f"this model takes {f'a multiple of {lanes}, ' if lanes > 1 else ''}{most} at most"
    if asked > gpu.num_sms:
        of = f"{gpu.name} has {gpu.num_sms} compute units, for one each"
    if asked % lanes or not 0 <= asked <= most:
        raise RequestError(f"{asked} blocks: {of}")
    return asked


def _most_of_lane(schedule: Schedule) -> int:
    """Blocks: each has rows of the residual stream."""
    return -(-schedule.spec.hidden_size // FRAGMENT_ROWS)


def lower_hip(schedule: Schedule, gpu: Gpu, num_blocks: int = 0) -> HipLowering:
    """The lowering of a schedule for an AMD GPU. ModelError names what the kernel cannot do."""
    spec = schedule.spec
    if spec.dtype is DType.F32:
        raise ModelError("the hip backend reads 16-bit weights: choose --dtype bf16 or fp16")
    if spec.narrow:
        raise ModelError("the hip backend reads 16-bit weights, and these are narrow")
    group = (num_blocks or gpu.num_blocks) // schedule.shards_per_rank
    group = max(1, min(group, _most_of_lane(schedule)))
    blocks = group * schedule.shards_per_rank
    tilings = cut_stages(schedule, FRAG_K, FRAGMENTS, blocks)
    if tilings is None:
        raise ModelError(f"hidden_size {spec.hidden_size} cannot be cut for the hip backend")
    lowering = HipLowering(schedule, blocks, tilings, gpu, FRAG_K, FRAGMENTS)
    unknown = [s.name for s in matrix_stages(schedule) if lowering.weights[s.name].pack != 1]
    assert not unknown, unknown
    return replace(lowering, tilings=shifted(lowering))
