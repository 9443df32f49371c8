"""The layout of a kernel of several token columns: one step serves as many requests.

The kernel of columns reads the weight stream of the kernel of one token. Regions of words have a row a lane and
column, or hold the operands of all columns of a lane as warps read them (include/kog/operands.h); flags have
a word a unit. Activations that outgrow shared memory are refused.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from kog_triton.backends.cuda.layout.attention import attention_bytes
from kog_triton.backends.cuda.layout.batches import column_small_bytes, finished_pieces, up
from kog_triton.backends.cuda.layout.exchanges import column_kernel
from kog_triton.backends.cuda.layout.layout import PARTIAL_BYTES, Layout, check_model
from kog_triton.errors import ModelError
from kog_triton.schedule.cuda import WINDOW_BYTES, CudaLowering
from kog_triton.schedule.exchanges import check_kernel
from kog_triton.schedule.lowering import matrix_stages

COUNTS = (2, 4, 8)  # columns that kernels are made for
POSITIONS = 8  # of a chunk, where so many fit
MOST_KV_TASKS = 10  # that COLUMN_SMALL_BYTES have room for
log = logging.getLogger(__name__)
Laid = TypeVar("Laid", bound=Layout)
LayOut = Callable[..., Layout]  # as lay_out_columns


def layouts_of_slots(
    lowering: CudaLowering, max_context: int, counts: Sequence[int], num_slots: int, lay_out: LayOut | None = None
) -> dict[int, Layout]:
    """The layouts of `counts` (ascending) that so many slots can fill, by count; the log says which do not fit.
    `lay_out`: of another vendor's kernels."""
    lay_out = lay_out or lay_out_columns
    layouts: dict[int, Layout] = {}
    for count in counts:
        if count >= 2 * num_slots:
            break
        try:
            layouts[count] = lay_out(lowering, max_context, count)
        except ModelError as error:
            log.info("no kernel of %d columns: %s", count, error)
            break
    return layouts


def layout_of_chunks(
    lowering: CudaLowering, max_context: int, positions: int, lay_out: LayOut | None = None
) -> Layout | None:
    """Of the most positions up to `positions` that fit; None if none do. The log says what does not fit. `lay_out` as
    above."""
    lay_out = lay_out or lay_out_columns
    counts = sorted((c for c in COUNTS if c <= positions), reverse=True)
    for count, fewer in zip(counts, [*counts[1:], 1], strict=False):
        try:
            return lay_out(lowering, max_context, count, chunk=True)
        except ModelError as error:
            what = f"{fewer} positions" if fewer > 1 else "a token"
            log.info("prompts run %s at a time: %s", what, error)
    return None


def lay_out_columns(lowering: CudaLowering, max_context: int, columns: int, chunk: bool = False) -> Layout:
    """Regions and shared memory for `columns` (COUNTS) requests a step, or positions of one prompt if it is a
    `chunk`; ModelError if they do not fit."""
    check_model(lowering)
    layout, scratch = begin_columns(Layout, lowering, max_context, columns, chunk)
    free = lowering.gpu.shared_bytes - scratch - layout.small_bytes
    ring = free // (lowering.ring_slot_bytes + 16)
    # As many as are in flight on an H200 at most: where blocks read faster, a ring of more is better and not needed.
    window = min(lowering.slots_in_flight(WINDOW_BYTES), lowering.ring_slots_of(WINDOW_BYTES))
    if ring < window:
        raise ModelError(
            f"{scratch} bytes of activations of {columns} requests leave {ring} ring slots of shared memory: "
            f"{window} are needed"
        )
    return replace(layout, scratch_bytes=scratch, ring_slots=ring)


def begin_columns(
    make: Callable[..., Laid], lowering: CudaLowering, max_context: int, columns: int, chunk: bool
) -> tuple[Laid, int]:
    """A layout of columns by `make`, without scratch, and bytes of scratch that its stages take; ModelError where a
    block has too many KV tasks."""
    schedule, spec = lowering.schedule, lowering.schedule.spread
    stages = {stage.name: stage for stage in matrix_stages(schedule)}
    splits = max(1, lowering.group_size(stages["qkv_proj"]) // schedule.shard_kv_heads)
    kernel = column_kernel(lowering, splits, columns)
    check_kernel(kernel)
    layout = make(
        lowering,
        max_context,
        kernel,
        splits,
        scratch_bytes=0,
        ring_slots=0,
        columns=columns,
        chunk=chunk,
        partial_bytes=0,
        small_bytes=column_small_bytes(lowering),
    )
    if layout.block_kv_tasks > MOST_KV_TASKS:
        raise ModelError(
            f"{schedule.shard_kv_heads} key/value heads and {columns} columns give a block {layout.block_kv_tasks - 1} "
            f"KV tasks: kernels of columns take {MOST_KV_TASKS - 1}"
        )
    behind = layout.stage_bytes(stages["o_proj"]) + max(
        attention_bytes(spec, splits, layout.new_rows), layout.head_places["end"]
    )
    rooms = [PARTIAL_BYTES, behind, *(layout.stage_bytes(s) for s in stages.values())]
    if any(e.is_used for e in kernel.exchanges if e.name.endswith("_sent")):
        # Beside all that o_proj and down_proj keep, where x is staged for other stages.
        at = up(max(behind, layout.stage_bytes(stages["down_proj"])), 128)
        joined = max(finished_pieces(lowering, stages[s], columns) for s in ("o_proj", "down_proj"))
        layout = replace(layout, joined_at=at)
        rooms.append(at + joined * 32 * 4)
    return layout, up(max(rooms), 128)
