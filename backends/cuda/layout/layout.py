"""Where things lie: regions of words that blocks exchange, and how a block's shared memory is cut.

    words    regions of 32-bit words, one row a shard (and slot); rows start on 16 bytes, regions on 128
    shared   ring | mbarriers | scratch (activations, or attention) | partial sums, twice | small things

What attention finds may run on over the partial sums, which nobody needs by then, if that makes room for a
chunk.

A kernel of several token columns (include/kog/columns) has regions and scratch of its own: columns.py.
"""

from dataclasses import dataclass
from functools import cached_property

from kog_triton.backends.cuda.layout.attention import (
    HEADS_AT_ONCE,
    MERGED,
    attention_bytes,
    head_places,
    part_queries,
    received_bytes,
    row_dim,
)
from kog_triton.backends.cuda.layout.batches import (
    THREADS,
    batch_units,
    held_steps,
    read_slots,
    read_steps,
    row_words,
    small_bytes,
    staged_bytes,
    step_bytes,
    sum_buffers,
    sum_bytes,
    sums_in_place,
    sums_over,
    unit_pieces,
    up,
    whole_words,
)
from kog_triton.backends.cuda.layout.exchanges import decode_kernel
from kog_triton.errors import ModelError
from kog_triton.schedule.cuda import CALM_BYTES, PARTIAL_ROWS, WARPS, WINDOW_BYTES, CudaLowering
from kog_triton.schedule.exchanges import Kernel, Region, check_kernel, lay_out_regions
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.schedule import Stage

HELPERS = 4 * 32  # one warp fills the ring, one watches over waits; four give up registers together
SMALL_BYTES = 832  # of shared memory: sums of squares, candidates, cursors, flags; of so many blocks:
PARTIAL_BYTES = 2 * PARTIAL_ROWS * WARPS * 4
ROW_WORDS = 4  # a row begins at a multiple of what one thread loads at once


@dataclass(frozen=True)
class Layout:
    lowering: CudaLowering
    max_context: int
    kernel: Kernel  # what its blocks exchange
    splits: int  # parts of the context, each with a block of its own
    scratch_bytes: int
    ring_slots: int
    threads: int = THREADS + HELPERS
    columns: int = 1  # tokens that one step computes
    chunk: bool = False  # they are positions in a row of one prompt, not one each of several requests
    partial_bytes: int = PARTIAL_BYTES
    small_bytes: int = SMALL_BYTES
    joined_at: int = 0  # in scratch: what other lanes have sent (include/kog/columns/lanes.h)
    profile_tokens: int = 0  # newest tokens whose stamps are kept; 0 = no stamps are taken
    tokens_only: bool = False  # no request wants more of its logits than a token (early.py)
    deep: bool = False  # keys and values come through the ring (include/kog/deep.h)

    @property
    def part_queries(self) -> int:
        """Query heads of a block where a kernel of several columns deals out a head's."""
        schedule = self.lowering.schedule
        group = self.lowering.group_size(schedule.stage("qkv_proj"))
        return part_queries(schedule.spread, self.columns * schedule.shard_kv_heads, group)

    @property
    def head_parts(self) -> int:
        """Blocks that those queries keep busy."""
        return -(-self.lowering.schedule.spread.group // self.part_queries)

    @property
    def block_kv_tasks(self) -> int:
        """KV tasks of a block in a layer of a kernel of several columns, at most, and one behind the last."""
        schedule = self.lowering.schedule
        group = self.lowering.group_size(schedule.stage("qkv_proj"))
        tasks = self.columns * schedule.shard_kv_heads * max(self.splits, self.head_parts)
        return -(-tasks // group) + 1 if self.columns > 1 else 1

    @cached_property
    def regions(self) -> dict[str, Region]:
        return lay_out_regions(self.kernel.exchanges, ROW_WORDS)

    @property
    def new_rows(self) -> int:
        """Positions of one step that a unit of attention receives as words."""
        return self.columns if self.chunk else 1

    @property
    def head_places(self) -> dict[str, int]:
        """Scratch of a head that one block walks, in a kernel of several columns."""
        spec, merged = self.lowering.schedule.spread, min(MERGED, self.splits)
        return head_places(spec, self.part_queries, merged, self.new_rows)

    @property
    def total_words(self) -> int:
        return up(max(r.end for r in self.regions.values()), 32)

    def region(self, name: str) -> Region:
        """Empty if this kernel has no such exchange."""
        return self.regions.get(name, Region(0, 0))

    def place_of(self, step: str, word: int) -> str:
        """Where a wait stood: what its error record says, in names."""
        if step == "ring":
            return f"ring, slot {word}"
        if step == "mask":
            return f"mask, word {word} of the host's"
        for name, region in self.regions.items():
            if region.offset <= word < region.end:
                return f"{step}, word {word - region.offset} of {name}"
        return step

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """A slot's keys and values on one rank: [layers, lanes, kv_heads, 2, positions, row_dim]."""
        schedule, spec = self.lowering.schedule, self.lowering.schedule.spec
        lanes, heads = schedule.shards_per_rank, schedule.shard_kv_heads
        return (spec.num_layers, lanes, heads, 2, self.max_context, row_dim(spec))

    def products(self, stage: Stage) -> dict[str, int]:
        """What the kernel knows of a matrix stage's operands and partial sums, by the names of its constants."""
        lo, columns = self.lowering, self.columns
        return {
            "batch": batch_units(lo, stage, columns),
            "buffer_floats": self.partial_bytes // 8,
            "held": held_steps(lo, stage, columns),
            **({"whole_words": whole_words(lo, stage)} if lo.weights[stage.name].integer else {}),
            "read": read_steps(lo, stage, columns),
            "read_slots": read_slots(lo, stage),
            "step_bytes": step_bytes(lo, stage, columns),
            "row_words": row_words(lo, stage, columns),
            "pieces": unit_pieces(lo.tilings[stage.name].unit_rows, columns),
            "sums_at": self.sums_at(stage),
            "operands_at": lo.operands_at(stage, columns),
            "whole_sums_at": lo.whole_sums_at(stage, columns),
            "sum_buffers": sum_buffers(lo, stage, columns),
            "sums_in_place": sums_in_place(lo, stage, columns),
            "sums_over": sums_over(lo, stage, columns),
        }

    def staged_bytes(self, stage: Stage) -> int:
        """Of a matrix stage's inputs in scratch."""
        return staged_bytes(self.lowering, stage, self.columns)

    def sums_at(self, stage: Stage) -> int:
        """Where a matrix stage's partial sums begin in the scratch of a kernel of several columns."""
        lo = self.lowering
        if sums_in_place(lo, stage, self.columns) or sums_over(lo, stage, self.columns):
            return lo.operands_at(stage, self.columns)
        return self.staged_bytes(stage)

    def stage_bytes(self, stage: Stage) -> int:
        """Of its inputs and partial sums, in a kernel of several columns."""
        lo, staged = self.lowering, self.staged_bytes(stage)
        sums = batch_units(lo, stage, self.columns) * sum_bytes(lo, stage, self.columns)
        sums *= sum_buffers(lo, stage, self.columns)
        return max(staged, self.sums_at(stage) + sums)

    @property
    def results_over_sums(self) -> bool:
        """Whether what attention finds runs on over the partial sums."""
        if self.columns > 1:
            return False
        schedule = self.lowering.schedule
        room = self.staged_bytes(schedule.stage("o_proj"))
        return room + attention_bytes(schedule.spread, self.splits) > self.scratch_bytes

    @property
    def windows(self) -> tuple[int, int]:
        """Ring slots in flight: at most, and while the block has some to go on with."""
        lo = self.lowering
        if self.columns > 1:
            window, calm = lo.slots_in_flight(WINDOW_BYTES), lo.slots_in_flight(CALM_BYTES)
            window = min(window, self.ring_slots)
        else:
            window, calm = min(lo.window_slots, self.ring_slots // 2), lo.calm_slots
        return window, min(calm, window)

    @property
    def shared_bytes(self) -> int:
        ring = self.ring_slots * (self.lowering.ring_slot_bytes + 16)
        return ring + self.partial_bytes + self.scratch_bytes + self.small_bytes


def lay_out(lowering: CudaLowering, max_context: int) -> Layout:
    """Regions and shared memory. ModelError names what this kernel cannot do."""
    check_model(lowering)
    splits, kernel = proved_kernel(lowering)
    scratch, over_sums, _ = scratch_rooms(lowering, splits)
    small = small_bytes(lowering, SMALL_BYTES)
    ring = _ring_beside(lowering, scratch, small)
    if _ring_beside(lowering, over_sums, small) > ring:
        scratch, ring = over_sums, _ring_beside(lowering, over_sums, small)
    if ring < lowering.least_ring_slots:
        raise ModelError(
            f"{scratch} bytes of activations leave {ring} ring slots of shared memory: "
            f"the cuda backend needs {lowering.least_ring_slots}"
        )
    return Layout(lowering, max_context, kernel, splits, scratch, ring, small_bytes=small)


def proved_kernel(lowering: CudaLowering) -> tuple[int, Kernel]:
    """Splits of the context, and what the blocks of the kernel of one token exchange."""
    schedule = lowering.schedule
    splits = max(1, lowering.group_size(schedule.stage("qkv_proj")) // schedule.shard_kv_heads)
    kernel = decode_kernel(lowering, splits)
    check_kernel(kernel)
    return splits, kernel


def scratch_rooms(lowering: CudaLowering, splits: int) -> tuple[int, int, int]:
    """Bytes of scratch where results of attention lie in it, where they run on over the partial sums, and where stages'
    inputs do so, too (but for o_proj's: attention's results lie behind those)."""
    schedule, spec = lowering.schedule, lowering.schedule.spread
    rooms = {stage.name: staged_bytes(lowering, stage) for stage in matrix_stages(schedule)}
    attention = rooms["o_proj"] + attention_bytes(spec, splits)
    least = max(rooms["o_proj"] + received_bytes(spec), attention - PARTIAL_BYTES)
    return (up(max(*rooms.values(), attention), 128), up(max(*rooms.values(), least), 128), up(least, 128))


def _ring_beside(lowering: CudaLowering, scratch: int, small: int) -> int:
    """Ring slots of shared memory that so many bytes of scratch and of small things leave."""
    free = lowering.gpu.shared_bytes - PARTIAL_BYTES - scratch - small
    return free // (lowering.ring_slot_bytes + 16)


def check_model(lowering: CudaLowering) -> None:
    """ModelError naming what no kernel of this folder can do."""
    schedule, spec = lowering.schedule, lowering.schedule.spread
    ranks = schedule.num_ranks
    if spec.vocab_size % ranks:
        raise ModelError(f"vocab_size {spec.vocab_size} does not divide over {ranks} GPUs")
    if spec.head_dim > 256 or spec.head_dim % 8:
        raise ModelError(f"head_dim {spec.head_dim}: the cuda backend takes multiples of 8 up to 256")
    if spec.group > HEADS_AT_ONCE * WARPS:
        raise ModelError(f"{spec.group} query heads a key/value head: the cuda backend takes {HEADS_AT_ONCE * WARPS}")
