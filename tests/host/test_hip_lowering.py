"""The HIP kernel's lowering and LDS: every block and unit as the kernel takes them, and models that it refuses."""

import pytest

from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.hip.layout import STATIC_BYTES, lay_out_hip
from kog_triton.errors import ModelError
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType
from kog_triton.schedule.check import check_partition, check_schedule
from kog_triton.schedule.hip import THREADS, lower_hip
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.lowering_cases import lanes
from tests.lib.ring_walker import spec_of

MI300X = GPUS["mi300x"]
MODELS = ("llama-3.2-1b", "qwen3-0.6b", "qwen3-8b", "laneformer-2b")


@pytest.mark.parametrize("name", MODELS)
def test_models_of_full_size_fit_the_gpu(name):
    schedule = build(named_shape(name))
    lowering = lower_hip(schedule, MI300X)
    check_schedule(schedule)
    check_partition(lowering)
    layout = lay_out_hip(lowering, 4096)
    assert layout.shared_bytes + STATIC_BYTES <= MI300X.shared_bytes
    assert (layout.threads, layout.ring_slots) == (THREADS, 0)
    for stage in matrix_stages(schedule):
        assert lowering.ring_slot_bytes == lowering.fragment_bytes(stage) == THREADS * 16


def test_a_header_says_that_there_is_no_ring():
    layout = lay_out_hip(lower_hip(build(lanes(1)), MI300X, 8), 64)
    text = render(layout)
    for line in ("int kRingSlots = 0;", "int kThreads = 512;", "int kFragments = 1;"):
        assert line in text


def test_what_the_kernel_cannot_read_is_refused():
    with pytest.raises(ModelError, match="16-bit weights: choose --dtype"):
        lower_hip(build(spec_of(dtype=DType.F32)), MI300X)


@pytest.mark.parametrize("values", [32256, 32768, 1 << 16])
def test_activations_that_lds_has_no_room_for_are_refused(values):
    spec = spec_of(intermediate_size=values, dtype=DType.BF16)
    with pytest.raises(ModelError, match="bytes of LDS: mi300x has") as refused:
        lay_out_hip(lower_hip(build(spec), MI300X, 4), 64)
    needed, room = (int(word) for word in str(refused.value).split() if word.isdigit())
    assert needed > room
