"""Kernels whose declared exchanges are proved, of models that reduce in every way, and a change of a declaration."""

from dataclasses import replace

from kog_triton.backends.cuda.layout.exchanges import column_kernel, decode_kernel
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import Head, Reduce
from kog_triton.schedule import triton, triton_exchanges
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.ring_walker import spec_of

MODELS = {
    "plain": spec_of(),
    "laneformer": named_shape("laneformer-2b"),
    "one layer of two lanes": spec_of(num_layers=1, num_lanes=2, reduce_mlp=(Reduce.OWN,)),
    **{f"lanes, {head.name}": mixed_lanes(head) for head in Head},
}
KERNELS = ("decode", "columns", "triton", "prompt")


def kernel_of(spec, which, ranks=1):
    schedule = build(spec, ranks)
    if which in ("triton", "prompt", "shared"):
        tiles = triton.lower_tiles(schedule, 132, 1024)
        makes = {
            "triton": triton_exchanges.decode_kernel,
            "prompt": triton_exchanges.prompt_kernel,
            "shared": triton_exchanges.shared_kernel,  # lanes share no step
        }
        return makes[which](tiles, schedule)
    lowering = lower(schedule, GPUS["h200"])
    return decode_kernel(lowering, 4) if which == "decode" else column_kernel(lowering, 4, 8)


def change(kernel, name, **changes):
    changed = (replace(e, **changes) if e.name == name else e for e in kernel.exchanges)
    return replace(kernel, exchanges=tuple(changed))
