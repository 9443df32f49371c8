"""Where things lie for the HIP kernel: the CUDA kernel's words, and LDS without a ring."""

from functools import cached_property

from kog_triton.backends.cuda.layout.batches import small_bytes, up
from kog_triton.backends.cuda.layout.layout import (
    SMALL_BYTES,
    Layout,
    check_model,
    proved_kernel,
    scratch_rooms,
)
from kog_triton.errors import ModelError
from kog_triton.schedule.exchanges import Region
from kog_triton.schedule.hip import THREADS, HipLowering

STATIC_BYTES = (
    128  # of LDS that the compiler lays out: what each wave brings to a barrier (include/kog/ptx.h)
)


class HipLayout(Layout):
    """With a word a workgroup by which all learn on which XCD it lies (include/kog/place.h)."""

    @cached_property
    def regions(self) -> dict[str, Region]:
        others = super().regions
        end = up(max(r.end for r in others.values()), 32)
        return others | {"places": Region(end, up(self.lowering.num_blocks, 32))}


def lay_out_hip(lowering: HipLowering, max_context: int) -> HipLayout:
    """Regions and LDS. ModelError names what this kernel cannot do."""
    check_model(lowering)
    splits, kernel = proved_kernel(lowering)
    small = small_bytes(lowering, SMALL_BYTES)
    most = lowering.gpu.shared_bytes - STATIC_BYTES
    for scratch in scratch_rooms(lowering, splits):
        layout = HipLayout(
            lowering, max_context, kernel, splits, scratch, 0, threads=THREADS, small_bytes=small
        )
        if layout.shared_bytes <= most:
            return layout
    raise ModelError(
        f"activations and partial sums take {layout.shared_bytes} bytes of LDS: "
        f"{lowering.gpu.name} has {most} for them"
    )
