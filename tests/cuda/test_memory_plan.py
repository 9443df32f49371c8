"""What a model takes is known before its weights are loaded, and refused in one line with what would fit."""

import pytest
import torch

from kog_triton.backends.cuda import memory as cuda_memory
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.backends.cuda.memory import allocate, plan_of
from kog_triton.backends.memory_plan import GIB, WORKSPACE, MemoryPlan, check_memory
from kog_triton.backends.triton.host import memory as triton_memory
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu
from kog_triton.schedule.triton import lower_tiles
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


def test_the_arena_is_the_same_however_much_is_packed_at_once(monkeypatch):
    spec = SPECS["llama"].replace(dtype=DType.BF16)
    lowering, weights = lower(build(spec), find_gpu("h200"), 5), RandomWeights(spec)
    embed = weights.load("embed")
    whole = cuda_memory.pack_arena(lowering, weights.load, embed)
    packs, right = [], cuda_memory._pack_wide
    monkeypatch.setattr(cuda_memory, "_pack_wide", lambda *given: packs.append(given[4]) or right(*given))
    monkeypatch.setattr(cuda_memory, "PACKED_AT_ONCE", 2 * lowering.ring_slot_bytes)
    assert torch.equal(cuda_memory.pack_arena(lowering, weights.load, embed), whole)
    assert max(map(len, packs)) <= 2 and whole.any()


@pytest.mark.parametrize("name", ["llama", "lanes at once"])
def test_triton_s_plan_is_what_is_allocated(name):
    spec = SPECS[name].replace(dtype=DType.BF16, intermediate_size=64)
    schedule = build(spec)
    tiles = lower_tiles(schedule, 2 * spec.num_lanes, 48, "cpu")
    memory = triton_memory.allocate(schedule, tiles, RandomWeights(spec), 3, torch.device("cpu"))
    plan = triton_memory.plan_of(schedule, tiles, 3)
    assert plan.weights == memory.weight_bytes
    assert plan.num_slots * plan.max_context * plan.position == memory.pointers.kv.nbytes


def test_what_does_not_fit_is_refused_with_what_would():
    assert PLAN.total == 18 * GIB + WORKSPACE
    PLAN.check(PLAN.total)
    with pytest.raises(DeviceError, match="choose max_model_len 4095 or less") as refused:
        PLAN.check(PLAN.total - 1)
    text = str(refused.value)
    assert text.startswith("10.0 GiB of weights and 4,096 positions a slot need 18.5 GiB, and 18.5 are free")
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


def test_no_more_than_its_share_of_the_gpu_is_taken(monkeypatch):
    """Whatever else is free; vLLM's name for the share."""
    gpu = torch.device("cuda")
    for name, value in (("mem_get_info", (36 * GIB, 37 * GIB)), ("memory_allocated", 0), ("memory_reserved", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    check_memory(PLAN, gpu, 0.5)
    with pytest.raises(
        DeviceError, match=r"and 18\.1 is what gpu_memory_utilization 0\.49 allows: choose max_model_len 3"
    ):
        check_memory(PLAN, gpu, 0.49)
