"""What a model takes is known before its weights are loaded, and refused in one line with what would fit."""

import pytest
import torch

from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.backends.cuda.memory import allocate, plan_of
from kog_triton.backends.memory_plan import GIB, WORKSPACE, MemoryPlan, check_memory
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu
from tests.lib.prefill_cases import SPECS

PLAN = MemoryPlan(weights=10 * GIB, position=1 << 20, num_slots=2, max_context=4096)


@pytest.mark.parametrize("name", ["llama", "lanes at once"])
def test_the_plan_is_what_is_allocated(name):
    spec = SPECS[name].replace(dtype=DType.BF16)
    layout = lay_out(lower(build(spec), find_gpu("h200"), 2 * spec.num_lanes), 48)
    memory = allocate(layout, RandomWeights(spec), 3, torch.device("cpu"))
    plan = plan_of(layout, 3)
    assert plan.weights == memory.weights.nbytes + memory.embed.nbytes
    assert plan.num_slots * plan.max_context * plan.position == memory.cache.nbytes


def test_what_does_not_fit_is_refused_with_what_would():
    assert PLAN.total == 18 * GIB + WORKSPACE
    PLAN.check(PLAN.total)
    with pytest.raises(DeviceError, match="choose max_model_len 4095 or less") as refused:
        PLAN.check(PLAN.total - 1)
    text = str(refused.value)
    assert text.startswith(
        "10.0 GiB of weights and 4,096 positions a slot need 18.5 GiB, and 18.5 are free"
    )
    assert "\n" not in text
    for free in (PLAN.total - 1, 11 * GIB):
        longest = PLAN.longest_context(free)
        MemoryPlan(10 * GIB, 1 << 20, 2, longest).check(free)
        with pytest.raises(DeviceError):
            MemoryPlan(10 * GIB, 1 << 20, 2, longest + 1).check(free)
    with pytest.raises(DeviceError, match="not even the weights fit"):
        PLAN.check(10 * GIB)


def test_what_torch_keeps_for_this_process_counts_as_free(monkeypatch):
    gpu = torch.device("cuda")
    held = {"mem_get_info": (PLAN.total - GIB, 200 * GIB), "memory_allocated": GIB}
    for reserved, fits in ((2 * GIB, True), (2 * GIB - 1, False)):
        for name, value in {**held, "memory_reserved": reserved}.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        if fits:
            check_memory(PLAN, gpu)
        else:
            with pytest.raises(DeviceError):
                check_memory(PLAN, gpu)
    check_memory(PLAN, torch.device("cpu"))
