"""The layout of the HIP kernel of several token columns: the words of CUDA's, and operands that are all in registers.

What a matrix instruction multiplies weights with is four registers a thread for each step of K, whatever the columns
fill of it, so that a wave holds its parts of a long K (include/kog/mma/operands.h). LDS has x as a stage's warps stage
it, whose place the partial sums take, and the sums of stages that take words.
"""

from dataclasses import replace
from functools import partial

from kog_triton.backends.cuda.layout.batches import step_bytes, sum_bytes, unit_pieces, up
from kog_triton.backends.cuda.layout.columns import begin_columns
from kog_triton.backends.cuda.layout.layout import check_model
from kog_triton.backends.hip.layout import STATIC_BYTES, HipLayout
from kog_triton.errors import ModelError
from kog_triton.schedule.cuda import WARPS, is_wide
from kog_triton.schedule.hip import THREADS, HipLowering
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.schedule import Stage

PIECE_WORDS = 4  # a thread's of a step and set: eight values
HELD_WORDS = 128  # of a thread's 256 registers: beside them weights on their way, and sums
SUMS_BYTES = 16 * 1024  # of LDS, for sums that take the place of nothing


class ColumnLayout(HipLayout):
    """Of several columns."""

    def products(self, stage: Stage) -> dict[str, int]:
        wide = is_wide(stage)
        return super().products(stage) | {
            "batch": self.batch_units(stage),
            "held": self.lowering.steps(stage),
            "read": 0,
            "row_words": self.row_words(stage),
            "sums_at": 0,
            "sum_buffers": 1,
            "sums_in_place": wide and self.units_in_place(stage) > 0,
            "sums_over": wide and self.units_in_place(stage) == 0,
        }

    def row_words(self, stage: Stage) -> int:
        """Registers of a thread for the operands of a step of K."""
        rows = self.lowering.tilings[stage.name].fragment_rows
        tokens = min(self.columns, rows // 2 if is_wide(stage) else rows)  # of a set
        return PIECE_WORDS * self.columns // tokens

    def held_words(self, stage: Stage) -> int:
        return self.lowering.steps(stage) * self.row_words(stage)

    def batch_units(self, stage: Stage) -> int:
        """Units whose sums are there at once: of each part of K where its operands were, or as many as find room in
        SUMS_BYTES; of two pieces a warp at most."""
        lo, columns = self.lowering, self.columns
        most = 2 * WARPS // unit_pieces(lo.tilings[stage.name].unit_rows, columns)
        block = -(-lo.num_units(stage) // lo.group_size(stage))
        units = self.units_in_place(stage) if is_wide(stage) else 0
        return min(units or SUMS_BYTES // sum_bytes(lo, stage, columns), most, block)

    def units_in_place(self, stage: Stage) -> int:
        """Of a wide stage, units whose sums find room where a part's operands were."""
        return self.staged_bytes(stage) // sum_bytes(self.lowering, stage, self.columns)

    def staged_bytes(self, stage: Stage) -> int:
        if not is_wide(stage):
            return 0
        return self.lowering.steps(stage) * step_bytes(self.lowering, stage, self.columns)

    def sums_at(self, stage: Stage) -> int:
        return 0

    def stage_bytes(self, stage: Stage) -> int:
        sums = self.batch_units(stage) * sum_bytes(self.lowering, stage, self.columns)
        return max(self.staged_bytes(stage), sums)


def lay_out_columns(lowering: HipLowering, max_context: int, columns: int, chunk: bool = False) -> ColumnLayout:
    """Regions and LDS for `columns` requests a step, or positions of one prompt if it is a `chunk`; ModelError if they
    do not fit."""
    check_model(lowering)
    make = partial(ColumnLayout, threads=THREADS)
    layout, scratch = begin_columns(make, lowering, max_context, columns, chunk)
    layout = replace(layout, scratch_bytes=up(scratch, 128))
    most = lowering.gpu.shared_bytes - STATIC_BYTES
    if layout.shared_bytes > most:
        raise ModelError(
            f"activations of {columns} requests take {layout.shared_bytes} bytes of LDS: {lowering.gpu.name} has "
            f"{most} for them"
        )
    for stage in matrix_stages(lowering.schedule):
        if layout.held_words(stage) > HELD_WORDS:
            raise ModelError(
                f"{stage.name}'s activations of {columns} requests take {layout.held_words(stage)} registers a thread: "
                f"the hip backend has {HELD_WORDS} for them"
            )
    return layout
