"""Where things lie for the HIP kernel: the CUDA kernel's words, and LDS without a ring."""

from functools import cached_property

from kog_triton.backends.cuda.layout.batches import batch_units, small_bytes, staged_bytes, sum_bytes, up
from kog_triton.backends.cuda.layout.layout import (
    PARTIAL_BYTES,
    SMALL_BYTES,
    Layout,
    check_model,
    proved_kernel,
    scratch_rooms,
)
from kog_triton.errors import ModelError
from kog_triton.schedule.exchanges import Region
from kog_triton.schedule.hip import THREADS, HipLowering
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.schedule import Stage

STATIC_BYTES = 128  # of LDS that the compiler lays out: what each wave brings to a barrier (include/kog/ptx.h)


class HipLayout(Layout):
    """With a word a workgroup by which all learn on which XCD it lies (include/kog/place.h)."""

    @cached_property
    def regions(self) -> dict[str, Region]:
        others = super().regions
        end = up(max(r.end for r in others.values()), 32)
        return others | {"places": Region(end, up(self.lowering.num_blocks, 32))}

    def products(self, stage: Stage) -> dict[str, int]:
        batch = self.units_behind(stage)
        if batch is None:
            return super().products(stage)
        sums = batch * sum_bytes(self.lowering, stage, 1)
        return super().products(stage) | {"batch": batch, "buffer_floats": sums // 4}

    def units_behind(self, stage: Stage) -> int | None:
        """Units of a batch where inputs of one token outgrow scratch and run on over other stages' partial sums: as
        many as find room behind the inputs, twice. None where the inputs do not."""
        lowering, staged = self.lowering, self.staged_bytes(stage)
        if self.columns > 1 or staged <= self.scratch_bytes:
            return None
        room = self.scratch_bytes + self.partial_bytes - staged
        return min(batch_units(lowering, stage), room // (2 * sum_bytes(lowering, stage, 1)))


def lay_out_hip(lowering: HipLowering, max_context: int) -> HipLayout:
    """Regions and LDS. ModelError names what this kernel cannot do."""
    check_model(lowering)
    splits, kernel = proved_kernel(lowering)
    small = small_bytes(lowering, SMALL_BYTES)
    inside, over_sums, least = scratch_rooms(lowering, splits)
    left = (lowering.gpu.shared_bytes - STATIC_BYTES - small - PARTIAL_BYTES) // 128 * 128
    # A stage's inputs and sums of one unit, twice, are the least that it needs.
    stages = matrix_stages(lowering.schedule)
    each = (staged_bytes(lowering, s) + 2 * sum_bytes(lowering, s, 1) for s in stages)
    needed, room = max(least + PARTIAL_BYTES, *each), left + PARTIAL_BYTES
    if needed > room:
        raise ModelError(
            f"activations and partial sums take {needed} bytes of LDS: {lowering.gpu.name} has {room} for them"
        )
    scratch = next((whole for whole in (inside, over_sums) if whole <= left), left)
    return HipLayout(lowering, max_context, kernel, splits, scratch, 0, threads=THREADS, small_bytes=small)
