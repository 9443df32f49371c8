"""The CUDA monokernel's lowering: how blocks and warps cut a stage, and what lies in the weight stream.

Every block reads one stream, front to back, through a ring in shared memory. The stream is what ring slot after ring
slot takes. One holds `fragments` fragments for each of the 16 warps, the first ones of all warps first, so that of a
stage's last one only what is used is read. A fragment is 8 rows by `frag_k` values of K, or 4 rows by twice as
many, row by row, of which one lane of mma.m16n8k16 reads 8 or 16 bytes at once (include/kog/matvec.h). Four
rows suit a matrix whose rows are few and divide badly among the blocks. A warp owns one part of K and one
group of rows of a unit:

    unit    = warps_rows x 8 or 4 rows, by all of K       (warps_k x warps_rows = 16 warps)
    warp    = rows_group * warps_k + k_part
    stream  = stages in order > units > steps along the warp's K > fragment

Fragments of narrow weights hold twice or four times as many values of K, and bring their scales (cuda_weights.py).

Chunk i of all blocks lie side by side: 1-2 % faster than one region a block (H200: benchmarks/cuda-log.md#prototypes).
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kog_triton.errors import ModelError
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda_weights import FRAGMENT_ROWS as MMA_ROWS
from kog_triton.schedule.cuda_weights import STEP_VALUES, StreamWeights, stage_weights, unreadable
from kog_triton.schedule.lowering import Partition, Tiling, Units, layer_matrices, matrix_stages
from kog_triton.schedule.schedule import Epilogue, Prologue, Schedule, Scope, Stage
from kog_triton.schedule.topology import GPUS, KB, Gpu

WARPS = 16  # consumer warps; one more warp fills the ring
# Weight rows of one mma.m16n8k16; its 16 hold 2 or 4 parts of each row. Narrow weights take eight.
FRAGMENT_ROWS = (MMA_ROWS, 4)
SLOT_ALIGNMENT = 128  # of a ring slot, in memory and on chip
OPERAND_ALIGNMENT = 16  # of what a thread loads at once
# (frag_k, fragments a warp and ring slot): slots of 12 to 24 KB. Smaller ones leave bandwidth behind, larger
# ones let blocks drift apart (prototype on four H200s: 24 KB 2,878 tokens/s, 12 KB 3,054), unless it is
# they alone that end where units do (benchmarks/cuda-log.md#prototypes, benchmarks/cuda-log.md#chunks-24). Narrow ones
# take the first that they can be cut for: of Qwen3-14B int4 24 KB took 1.57 times as long (#narrow-cuts there).
CHUNKS = ((32, 2), (32, 3), (16, 3), (16, 4))
# In flight a block: more makes polls queue behind weights (H200: benchmarks/cuda-log.md#window). Then the same while
# the block has ring slots to go on with, both where the stream sets the pace (benchmarks/cuda-log.md#stream-window).
# Where a block reads faster or slower than an H200's, as many as take it as long: an estimate, not a measurement.
WINDOW_BYTES, CALM_BYTES = 48 * KB, 32 * KB
STREAM_WINDOW_BYTES, STREAM_CALM_BYTES = 64 * KB, 48 * KB
# Of narrow weights, whose blocks exchange words more often by the byte: Qwen3-32B int4 1 %, 8B int4 2 to 3 % faster,
# FP8 alike (H200: benchmarks/cuda-log.md#narrow-32b).
NARROW_CALM_BYTES = 32 * KB
MEASURED_RATE = GPUS["h200"].block_rate
PARTIAL_ROWS = 128  # rows whose partial sums are held at once, twice
# Fragments of a period, units up to where they end with a ring slot, whose code is laid out. Longer periods have a loop
# for each unit, of narrow weights alone (CudaLowering.long_units).
UNROLLED = 18
# Time of a byte in narrow fragments, whose loop takes twice the instructions, in wide ones: an
# estimate, not a measurement.
NARROW_COST = 1.1
# Where K is cut in as many parts as there are warps, each stages its own part of the activations and
# waits for no other warp; else all meet at a barrier. The same: an estimate.
SHARED_COST = 1.02
# Bytes that four rows may read where eight read one, unless eight leave a block without any row.
MOST_PADDING = 1.05
FOUR_ROWS_COST = 1.03  # the same for fragments of four rows, whose sums take three shuffles for one


@dataclass(frozen=True)
class CudaLowering(Partition):
    """A partition with the stream's layout. Tilings: unit_rows = fragment_rows * warps_rows, k_parts = warps_k."""

    gpu: Gpu
    frag_k: int
    fragments: int  # of one warp in one ring slot

    @cached_property
    def weights(self) -> dict[str, StreamWeights]:
        """How every matrix stage's weights lie in the stream, by name."""
        return {stage.name: stage_weights(self.schedule, stage, self.frag_k) for stage in matrix_stages(self.schedule)}

    def fragment_bytes(self, stage: Stage) -> int:
        """Of one fragment of all warps, scales included."""
        weights = self.weights[stage.name]
        return WARPS * (weights.warp_bytes + weights.record_bytes)

    @cached_property
    def ring_slot_bytes(self) -> int:
        """Of the stage whose slots take most; other stages' slots are filled in part."""
        most = max(self.fragment_bytes(stage) for stage in matrix_stages(self.schedule))
        return -(-self.fragments * most // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @cached_property
    def ring_slots(self) -> int:
        return (self.gpu.shared_bytes - self.fixed_shared_bytes) // (self.ring_slot_bytes + 16)

    @cached_property
    def streams(self) -> bool:
        """Whether a layer of the block that reads most is more than two rings: then the stream sets the pace,
        else the exchanges do."""
        stages = [s for s in matrix_stages(self.schedule) if s.name != "lm_head"]
        blocks = np.arange(self.num_blocks)
        reads = [self.stage_ring_slots(s, 0, self.group_index(s, blocks)) for s in stages]
        return bool(np.sum(reads, 0).max() > 2 * self.ring_slots)

    @cached_property
    def window_slots(self) -> int:
        wanted = self.slots_in_flight(self._window_bytes)
        return min(wanted, max(self.least_window, self.ring_slots // 2))

    @cached_property
    def calm_slots(self) -> int:
        if self.schedule.spec.narrow:
            return self.slots_in_flight(NARROW_CALM_BYTES)
        return self.slots_in_flight(STREAM_CALM_BYTES if self.streams else CALM_BYTES)

    @cached_property
    def least_window(self) -> int:
        """Ring slots in flight that a long ring has room for: those of an H200 at most."""
        return min(self.slots_in_flight(self._window_bytes), self.ring_slots_of(self._window_bytes))

    @cached_property
    def least_ring_slots(self) -> int:
        """Of a ring that holds two windows: as many bytes as two of an H200's at most."""
        size = 2 * self._window_bytes
        return min(self.slots_in_flight(size), self.ring_slots_of(size))

    @property
    def _window_bytes(self) -> int:
        return STREAM_WINDOW_BYTES if self.streams else WINDOW_BYTES

    @property
    def pace(self) -> float:
        """Bytes / s of a block over those of an H200's."""
        return self.gpu.block_rate / MEASURED_RATE

    def ring_slots_of(self, size: int) -> int:
        """As many as reach `size` bytes."""
        return -(-size // self.ring_slot_bytes)

    def slots_in_flight(self, size: int) -> int:
        """As many as reach what `size` bytes are on an H200."""
        return max(1, math.ceil(size * self.pace / self.ring_slot_bytes))

    @cached_property
    def fixed_shared_bytes(self) -> int:
        """Shared memory beside the ring: partial sums twice, activations of the widest stage, words."""
        partials = 2 * PARTIAL_ROWS * WARPS * 4
        return partials + max(map(self.staged_bytes, matrix_stages(self.schedule))) + 2 * KB

    def staged_bytes(self, stage: Stage) -> int:
        """Of a stage's activations, as its warps read them, and of what lies before them."""
        return self.operands_at(stage) + self.padded_k(stage) * self.value_bytes(stage)

    def value_bytes(self, stage: Stage) -> int:
        """Of an activation: two 16-bit parts, a 16-bit word or two bytes."""
        return 4 if is_wide(stage) and not self.weights[stage.name].integer else 2

    def operands_at(self, stage: Stage, columns: int = 1) -> int:
        """Where a stage's activations begin: of whole numbers behind their scales and sums (include/kog/bytes.h).
        What is staged for one of a layer's wide stages serves the other."""
        if not self.weights[stage.name].integer:
            return 0
        sums = max(self._staged_scales(s) * columns * self.weights[s.name].sum_bytes for s in self._staged_alike(stage))
        size = 4 * self.whole_sums_at(stage, columns) + sums
        return -(-size // OPERAND_ALIGNMENT) * OPERAND_ALIGNMENT

    def whole_sums_at(self, stage: Stage, columns: int = 1) -> int:
        """Words of scales of whole numbers, which lie before their sums."""
        if not self.weights[stage.name].integer:
            return 0
        return max(self._staged_scales(s) for s in self._staged_alike(stage)) * columns

    def _staged_scales(self, stage: Stage) -> int:
        """Of one token."""
        return self.padded_k(stage) // (STEP_VALUES * self.weights[stage.name].shared_steps)

    def _staged_alike(self, stage: Stage) -> list[Stage]:
        """Stages that may take what is staged for one of whole numbers."""
        wide = [s for s in layer_matrices(self.schedule) if is_wide(s)]
        alike = wide if stage in wide else [stage]
        return [s for s in alike if self.weights[s.name].integer]

    def padded_k(self, stage: Stage) -> int:
        return self.tilings[stage.name].padded_k(stage.cols)

    def fragment(self, stage: Stage) -> tuple[int, int]:
        """Rows and values of K of one fragment of 16-bit weights: always as many bytes."""
        rows = self.tilings[stage.name].fragment_rows
        return rows, MMA_ROWS // rows * self.frag_k

    def steps(self, stage: Stage) -> int:
        """Steps along K of one warp, for one unit, of the values of a fragment of 16-bit weights each."""
        k = self.fragment(stage)[1]
        return self.padded_k(stage) // self.tilings[stage.name].k_parts // k

    def unit_fragments(self, stage: Stage) -> int:
        """Fragments along K of one warp, for one unit."""
        return self.steps(stage) // self.weights[stage.name].pack

    def long_units(self, stage: Stage) -> bool:
        """Whether units end within ring slots and are too long for code that is laid out: of narrow weights each of a
        period has a loop of its own then (include/kog/matvec.h, multiply_long_units); no others are cut so."""
        return _is_long(stage, self.weights[stage.name], self.unit_fragments(stage), self.fragments)

    def stage_fragments(self, stage: Stage, layer: int, block: Units, rank: int = 0) -> Units:
        """Fragments of one warp in one run of a stage by the block with this group index, or by each of an array."""
        first, last = self.unit_bounds(stage, layer, block, rank)
        return (last - first) * self.unit_fragments(stage)

    def stage_ring_slots(self, stage: Stage, layer: int, block: Units, rank: int = 0) -> Units:
        """Ring slots of one warp in one run of a stage, of which the last may be read in part."""
        return -(-self.stage_fragments(stage, layer, block, rank) // self.fragments)

    def stage_bytes(self, stage: Stage, layer: int, rank: int = 0) -> int:
        """Weight bytes that all blocks of a rank read in one run of a stage, padding included."""
        blocks = self.group_index(stage, np.arange(self.num_blocks))
        return self.fragment_bytes(stage) * int(self.stage_fragments(stage, layer, blocks, rank).sum())

    def group_index(self, stage: Stage, block: Units) -> Units:
        """A rank's block as its index in the group that runs the stage, or each of an array of them."""
        return block % self.group_size(stage)

    def shard(self, stage: Stage, block: int, rank: int) -> int:
        """The shard whose weights a rank's block multiplies with (the head has one for all)."""
        if stage.scope is Scope.ALL:
            return 0
        return rank * self.schedule.shards_per_rank + block // self.group_size(stage)

    def block_ring_slots(self, block: Units, rank: int = 0) -> Units:
        """Chunks that one block reads for one token, or each of an array of them."""
        slots = (
            self.stage_ring_slots(stage, layer, self.group_index(stage, block), rank)
            for segment in self.schedule.segments
            for stage in segment.stages
            if stage.name in self.tilings
            for layer in range(segment.repeat)
        )
        return sum(slots, start=0 * block)

    def stream_ring_slots(self, rank: int = 0) -> int:
        """Chunks of the longest stream; the others are as long in memory and stop earlier."""
        return int(self.block_ring_slots(np.arange(self.num_blocks), rank).max())

    def stream_bytes(self, rank: int = 0) -> int:
        """Weight bytes that a rank reads for one token, padding included."""
        return sum(
            self.stage_bytes(stage, layer, rank)
            for segment in self.schedule.segments
            for stage in segment.stages
            if stage.name in self.tilings
            for layer in range(segment.repeat)
        )


def lower(schedule: Schedule, gpu: Gpu, num_blocks: int = 0) -> CudaLowering:
    """The lowering whose busiest blocks read least; ties go to the larger ring, to ring slots that end where units
    do, to the larger fragment and to more K parts."""
    if schedule.spec.dtype is DType.F32:
        raise ModelError("float32 weights do not run on tensor cores: choose --dtype bf16 or fp16")
    if reason := unreadable(schedule):
        raise ModelError(f"the cuda backend: {reason}")
    # Every block must own a unit of the residual stream (check.py): a small model gets fewer blocks.
    group = (num_blocks or gpu.num_blocks) // schedule.shards_per_rank
    group = max(1, min(group, -(-schedule.spec.hidden_size // MMA_ROWS)))
    blocks = group * schedule.shards_per_rank
    candidates: list[CudaLowering] = []
    for frag_k, fragments in CHUNKS:
        if schedule.spec.narrow and candidates:
            break
        tilings = cut_stages(schedule, frag_k, fragments, blocks)
        if tilings is not None:
            candidates.append(CudaLowering(schedule, blocks, tilings, gpu, frag_k, fragments))
    if not candidates:
        raise ModelError(f"hidden_size {schedule.spec.hidden_size} cannot be cut for the cuda backend")
    deep = [c for c in candidates if c.ring_slots >= 2 * c.least_window]
    best = min(deep or candidates, key=lambda c: (_cost(c), -c.ring_slots * c.ring_slot_bytes, _unrolled(c)))
    return replace(best, tilings=shifted(best))


def shifted(lowering: CudaLowering) -> dict[str, Tiling]:
    """Tilings whose shifts give a unit more of a stage to blocks that had less of the layer's stages before it:
    all blocks wait for the last one, several times a layer."""
    tilings = dict(lowering.tilings)
    read = np.zeros(lowering.num_blocks, int)
    for stage in matrix_stages(lowering.schedule):
        if stage.name == "lm_head":
            continue
        size, own = lowering.group_size(stage), read[: lowering.group_size(stage)]
        fragments = lowering.stage_fragments(stage, 0, np.arange(size))
        shift = min(range(size), key=lambda by: int((own + np.roll(fragments, by)).max()))
        tilings[stage.name] = replace(tilings[stage.name], shift=shift)
        own += np.roll(fragments, shift)
    return tilings


def is_wide(stage: Stage) -> bool:
    """Whether activations come as float32 (kept as two 16-bit parts) or as 16-bit words."""
    return stage.prologue is Prologue.RMS_NORM or stage.source == "y"


def _unrolled(lowering: CudaLowering) -> int:
    """Stages some of whose units end within a ring slot: their code is several units long."""
    return sum(
        unit_period(lowering.unit_fragments(stage), lowering.fragments) > 1
        for stage in matrix_stages(lowering.schedule)
    )


def _cost(lowering: CudaLowering) -> float:
    """Bytes of one token, as if every block read as many as the busiest of its stage does."""
    read = sum(
        segment.repeat
        * int(lowering.stage_fragments(stage, 0, np.arange(lowering.group_size(stage)), rank).max())
        * lowering.fragment_bytes(stage)
        * (FOUR_ROWS_COST if lowering.fragment(stage)[0] != MMA_ROWS else 1)
        for rank in range(lowering.schedule.num_ranks)
        for segment in lowering.schedule.segments
        for stage in segment.stages
        if stage.name in lowering.tilings
    )
    return read * (NARROW_COST if lowering.frag_k == 16 else 1)


def _is_long(stage: Stage, weights: StreamWeights, fragments_of_unit: int, fragments: int) -> bool:
    period = unit_period(fragments_of_unit, fragments)
    # Code that is laid out does not read operands unit by unit, as kernels of columns may read down_proj's
    # (backends/cuda/layout/batches.py, read_steps).
    most = UNROLLED // weights.pack if stage.source == "mlp" else UNROLLED
    return period > 1 and period * fragments_of_unit > most


def unit_period(fragments_of_unit: int, fragments: int) -> int:
    """Units after which the last one ends with a ring slot."""
    return math.lcm(fragments_of_unit, fragments) // fragments_of_unit


def slice_values(schedule: Schedule, frag_k: int) -> int:
    """Of x, that a warp stages: of the residual stream, in whole fragments of every stage that multiplies x."""
    packs = (
        stage_weights(schedule, stage, frag_k).pack for stage in matrix_stages(schedule) if stage.source in ("x", "y")
    )
    whole = frag_k * max(packs)
    return -(-schedule.spec.hidden_size // (WARPS * whole)) * whole


def _is_staged(schedule: Schedule, stage: Stage, tiling: Tiling, frag_k: int) -> bool:
    """Whether what the warps stage of x, a slice each, covers what they multiply: it must be a warp's own part of
    K where it waits for no other."""
    if stage.source not in ("x", "y") or stage.cols != schedule.spec.hidden_size:
        return True
    staged = WARPS * slice_values(schedule, frag_k)
    multiplied = tiling.padded_k(stage.cols)
    return multiplied == staged if tiling.k_parts == WARPS else multiplied <= staged


def cut_stages(schedule: Schedule, frag_k: int, fragments: int, blocks: int) -> dict[str, Tiling] | None:
    """How every matrix stage is cut, by name; None if one of them cannot be."""
    tilings = {}
    for stage in matrix_stages(schedule):
        tiling = _tiling(schedule, stage, frag_k, fragments, blocks)
        if tiling is None:
            return None
        tilings[stage.name] = tiling
    return tilings


def _tiling(schedule: Schedule, stage: Stage, frag_k: int, fragments: int, blocks: int) -> Tiling | None:
    """How a stage is cut, so that its slowest block has least to do; None if it cannot be."""
    options = []
    weights = stage_weights(schedule, stage, frag_k)
    if weights.why_not():
        return None
    for rows, warps_k in itertools.product(FRAGMENT_ROWS, (16, 8, 4, 2)):
        if weights.format and rows != MMA_ROWS:
            continue
        k = MMA_ROWS // rows * frag_k * weights.pack
        for k_step in (k, k * fragments):
            tiling = Tiling(rows * WARPS // warps_k, warps_k, k_step, rows)
            steps = tiling.padded_k(stage.cols) // warps_k // k
            long_units = _is_long(stage, weights, steps, fragments)
            if long_units and not weights.format:
                continue
            if not _is_staged(schedule, stage, tiling, frag_k):
                continue
            partition = Partition(schedule, blocks, {stage.name: tiling})
            group = partition.group_size(stage)
            first, last = partition.unit_bounds(stage, 0, np.arange(group))
            reads = (last - first) * steps
            overtaken = stage.epilogue is Epilogue.RESIDUAL and partition.num_units(stage) < group
            # The slowest block sets the stage's time, the sum the bytes.
            slowest = int(reads.max()) * (1 if rows == MMA_ROWS else FOUR_ROWS_COST)
            bytes_read = int(reads.sum()) * (1 if warps_k == WARPS else SHARED_COST)
            options.append((overtaken, slowest, bytes_read, long_units, -warps_k, tiling))
    if not options:
        return None
    best = min(options, key=lambda option: option[:-1])
    plain = min(
        (option for option in options if option[-1].fragment_rows == MMA_ROWS),
        key=lambda option: option[:-1],
        default=best,
    )
    if best[0] == plain[0] and best[2] > MOST_PADDING * plain[2]:
        return plain[-1]
    return best[-1]
