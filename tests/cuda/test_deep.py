"""The kernel of one token for deep positions: keys and values come through the ring, and no bit is another."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import backend
from kog_triton.backends.cuda.deep import DeepKernel, deep_layout
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import DType, Head
from kog_triton.model.weight_format import FORMATS
from kog_triton.request_check import check_requests
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_planting import plant
from tests.lib.cuda_ranks import RankWalk
from tests.lib.cuda_requests import PROMPTS, request, run, serve, timeless
from tests.lib.cuda_threads import ThreadWalk
from tests.lib.cuda_walk import FiberBackend, Walk, compile_walk, layout_of
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.machine_code import is_local, machine_code, spec_named
from tests.lib.narrow_stages import FEW
from tests.lib.narrow_stream import narrow_spec, random_weights
from tests.lib.ring_walker import f16_spec, spec_of
from tests.lib.slow import some_always

ONE_ROW = f16_spec(hidden_size=88, num_heads=6, num_kv_heads=1, head_dim=24)
# name -> spec, blocks, options of the walk, tokens
WALKS = {
    "a row a split": (ONE_ROW, 0, {"split_least": 1, "merged_length": 11}, 14),
    "windows": (
        f16_spec(hidden_size=40, num_heads=6, num_kv_heads=1, windows=(3, 0, 7)),
        0,
        {"split_least": 1, "merged_length": 5},
        14,
    ),
    # Of 72 query heads a group's round is one tile of 16 positions: 60 of them are four rounds.
    "rounds": (
        f16_spec(num_layers=2, hidden_size=24, intermediate_size=32, num_heads=72, num_kv_heads=1, head_dim=8),
        1,
        {},
        60,
    ),
    # More slots than the ring has; three groups of five warps, and one of none.
    "slots": (
        spec_of(num_layers=1, hidden_size=48, num_heads=20, num_kv_heads=1, head_dim=128, intermediate_size=16),
        1,
        {"max_context": 256},
        230,
    ),
    "KV tasks": (spec_of(num_layers=2, num_heads=8, num_kv_heads=4, dtype=DType.BF16), 2, {"split_least": 2}, 20),
    "lanes": (mixed_lanes(Head.SUM_THEN_NORM), 4, {"split_least": 2}, 8),
    # Keys and values take the slots of codes and their scales, and words that o_proj multiplies as bytes follow.
    "fp8 blocks": (narrow_spec(FORMATS["fp8-block"], **FEW), 2, {"split_least": 2}, 20),
    "int4 g128": (narrow_spec(FORMATS["int4-g128"], **FEW), 2, {"split_least": 2}, 20),
}


def tokens_of(spec, count):
    return np.random.default_rng(0).integers(0, spec.vocab_size, count).tolist()


@pytest.mark.parametrize(
    "name", some_always(WALKS, "a row a split", "rounds", "slots", "KV tasks", "lanes", "int4 g128")
)
def test_deep_positions_have_the_bits_of_the_other_kernel(name):
    spec, blocks, options, count = WALKS[name]
    weights, tokens = random_weights(spec), tokens_of(spec, count)
    expected = Walk(spec, weights, blocks, **options).forward_logits(tokens)
    ours = Walk(spec, weights, blocks, deep=True, **options)
    for seed in range(3):
        assert np.array_equal(ours.forward_logits(tokens, seed), expected)


class DeepRanks(RankWalk):
    def _lay_out_ranks(self, lowering, max_context):
        return replace(super()._lay_out_ranks(lowering, max_context), deep=True)


@pytest.mark.parametrize("lanes", [False, True])
def test_ranks_have_the_bits_of_the_other_kernel(lanes):
    spec = mixed_lanes(Head.SUM_THEN_NORM) if lanes else spec_of(num_layers=2, dtype=DType.F16)
    spec = spec.replace(vocab_size=104)  # for two ranks
    weights, tokens = RandomWeights(spec), tokens_of(spec, 8)
    expected = RankWalk(spec, weights, 2, 2, split_least=2).forward_logits(tokens)
    ours = DeepRanks(spec, weights, 2, 2, split_least=2)
    assert all(np.array_equal(ours.forward_logits(tokens, seed), expected) for seed in range(3))


# Bytes of the ring that nothing has written are NaNs.
POISON = (
    "ring.h",
    "  if (b.thread == 0) {\n    for (int i = 0; i < kRingSlots; i++) {\n",
    "  if (b.thread == 0) {\n    for (int i = 0; i < kRingSlots * kRingSlotBytes; i++) b.ring[i] = 0xff;\n"
    "    for (int i = 0; i < kRingSlots; i++) {\n",
)
# name -> the walk that sees it, and the edit
BEHIND = "warps without a tile leave slots behind a barrier"
RARE = {BEHIND}  # takes as long as three others
FAULTS = {
    "the last step's row is asked for before it is acquired": (
        "a row a split",
        "produce.h",
        "if (end == position && left <= kSlotRows && !wait_for_rows(b, steps)) return false;",
        "",
    ),
    "no row is waited for": (
        "a row a split",
        "produce.h",
        "while (static_cast<int>(load_volatile(&b.small->acquired)) < kWarps * steps)",
        "while (false)",
    ),
    "values that are not there are taken": (
        "KV tasks",
        "deep.h",
        "values.take(b, tile + kValuesAt, cached - at);",
        "values.take(b, tile + kValuesAt, kTileRows);",
    ),
    "a slot too few is left": (
        "rounds",
        "deep.h",
        "  leave_slots(b, ring, slots);  //",
        "  leave_slots(b, ring, slots - 1);  //",
    ),
    BEHIND: (
        "slots",
        "deep.h",
        "  leave_slots(b, ring, slots);  //",
        "  sync_consumers();\n  leave_slots(b, ring, slots);  //",
    ),
}
NARROW_FAULTS = {
    "a slot too few is left to codes": (
        "fp8 blocks",
        "deep.h",
        "  leave_slots(b, ring, slots);  //",
        "  leave_slots(b, ring, slots - 1);  //",
    ),
    "values that are not there are taken beside bytes": (
        "int4 g128",
        "deep.h",
        "values.take(b, tile + kValuesAt, cached - at);",
        "values.take(b, tile + kValuesAt, kTileRows);",
    ),
}


def walked(walk, tokens, seed):
    """Logits, or none of a launch that did not end well. The cache holds nothing of a run before."""
    walk.memory.cache.fill_(torch.nan)
    try:
        return walk.forward_logits(tokens, seed)
    except AssertionError:
        return np.zeros(0)


@pytest.mark.parametrize("fault", some_always(FAULTS | NARROW_FAULTS, *(set(FAULTS) - RARE)))
def test_a_planted_fault_is_seen(fault, tmp_path):
    name, *edit = (FAULTS | NARROW_FAULTS)[fault]
    spec, blocks, options, count = WALKS[name]
    weights, tokens = random_weights(spec), tokens_of(spec, count)
    expected = Walk(spec, weights, blocks, **options).forward_logits(tokens)
    ours = Walk(spec, weights, blocks, deep=True, **options)
    for edits in ((POISON,), (POISON, tuple(edit))):
        folder = tmp_path / str(len(edits))
        folder.mkdir()
        changes = {key: value for key, value in options.items() if key != "max_context"}
        ours.library = compile_walk(ours.layout, include=plant(folder, *edits), **changes)
        found = (walked(ours, tokens, seed) for seed in range(3))
        assert all(np.array_equal(one, expected) for one in found) == (len(edits) == 1)


CONCURRENT = {
    "16 bits": spec_of(num_layers=2, dtype=DType.F16),
    **{name: WALKS[name][0] for name in ("fp8 blocks", "int4 g128")},
}


@pytest.mark.parametrize("name", some_always(CONCURRENT, "16 bits"))
def test_concurrent_blocks_race_for_nothing(name):
    spec, ids = CONCURRENT[name], [5, 17, 60, 31]
    weights = random_weights(spec)
    ours = ThreadWalk(spec, weights, 4, deep=True, split_least=2)
    expected = Walk(spec, weights, 4, split_least=2).forward_logits(ids)
    assert np.array_equal(ours.forward_logits(ids, 1), expected)
    assert (ours.verdict.code, ours.verdict.report) == (0, "")


@pytest.mark.parametrize("name", some_always(("llama-3.2-1b", "qwen3-8b", "laneformer-2b"), "llama-3.2-1b"))
def test_the_kernel_hardly_spills(name):
    assert spills(spec_named(name)) <= 48


# Loads and stores of local memory, found 8, 27, 2 and 2.
@pytest.mark.parametrize(
    ("name", "how"),
    some_always(
        itertools.product(("llama-3.2-1b", "qwen3-8b"), ("int4-g128", "fp8-block")), ("llama-3.2-1b", "int4-g128")
    ),
)
def test_the_kernel_of_narrow_weights_hardly_spills(name, how):
    assert spills(with_format(named_shape(name), FORMATS[how])) <= 48


def spills(spec):
    code = machine_code(deep_layout(layout_of(spec, max_context=4096)))
    return len([what for _, what in code if is_local(what)])


# ---- who is served by it ----

SPEC = f16_spec(num_layers=2)


class DeepBackend(FiberBackend):
    deep_kernel = True


@pytest.fixture(autouse=True)
def six_positions_are_deep(monkeypatch):
    monkeypatch.setattr(backend, "LEAST", 6)


def opened(kind=DeepBackend):
    return kind(RandomWeights(SPEC), BackendOptions(num_slots=2, max_context=160), 2)


def test_a_request_that_gets_deep_goes_on_by_the_other_kernel():
    asked = request(0, PROMPTS[0], 140, params=SamplingParams(temperature=0.8, seed=3))
    expected = timeless(run(opened(FiberBackend), asked)[0])
    ours = opened()
    ours.deep.begin()
    ours.settle()
    assert timeless(run(ours, asked)[0]) == expected
    assert ours.kernel.launches == 1 and ours.deep.take().launches == 1


def test_requests_that_take_turns_have_the_bits_of_the_other_kernel():
    asked = [
        request(0, PROMPTS[0], 20, params=SamplingParams(temperature=0.8, seed=3)),
        request(1, PROMPTS[1], 30, params=SamplingParams(temperature=0.0)),
    ]
    expected = run(opened(FiberBackend), *asked)
    ours = opened()
    ours.deep.begin()
    ours.settle()
    served = serve(ours, *asked)
    assert {slot: timeless(steps) for slot, steps in served.items()} == expected
    # Each launch has a clock of its own; the first ends at a request's sixth position.
    deep = zip(served[1][5:20], served[0][5:20], strict=True)
    times = [step.device_ns for both in deep for step in both]
    assert times == sorted(times), "not a token each in turn"
    assert ours.kernel.launches == 1 and ours.deep.take().launches == 2


def test_it_is_compiled_when_a_request_first_gets_deep():
    ours = opened()
    run(ours, request(0, PROMPTS[0][:2], 2))
    assert not ours.deep._compiled._threads
    run(ours, request(0, PROMPTS[0], 140))
    assert ours.deep._compiled._threads


@pytest.mark.parametrize("where", ["compile", "load"])
def test_without_it_the_other_kernel_serves_and_the_log_says_so_once(where, caplog):
    def refuse(_):
        raise DeviceError("no room")

    def accept(_):
        return SimpleNamespace()

    layout = layout_of(named_shape("llama-3.2-1b"), max_context=4096)
    build, load = (refuse, accept) if where == "compile" else (accept, refuse)
    kernel = DeepKernel(layout, build, load)
    for _ in range(3):
        assert kernel.wait(2048) is None
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["no kernel of deep positions, the kernel of one token serves them: no room"]
    assert kernel.wait(3) is None


def test_a_short_context_has_none():
    layout = layout_of(named_shape("llama-3.2-1b"), max_context=6)
    assert deep_layout(layout, least=6) is None and deep_layout(layout, least=5).deep
    kernel = DeepKernel(None, lambda _: None, lambda _: None)
    kernel.begin()
    assert not kernel.ready(1 << 20)


ONE, DEEP = "the kernel of one token", "the kernel of deep positions"
SMALL = SPEC.replace(vocab_size=1200)  # ids enough for all ways of sampling


def test_a_gpu_that_is_new_is_tried_with_it():
    assert check_requests(DeepBackend, SMALL, "here") == [ONE, DEEP]
    assert check_requests(FiberBackend, SMALL, "here") == [ONE]


def test_a_gpu_that_is_new_and_computes_wrong_with_it_is_refused():
    class Wrong(DeepBackend):
        def _load(self, source, entry, layout):
            kernel = super()._load(source, entry, layout)
            if layout.deep:
                self.memory.embed.fill_(1)
            return kernel

    class Missing(DeepBackend):
        def _load(self, source, entry, layout):
            if layout.deep:
                raise DeviceError("no room")
            return super()._load(source, entry, layout)

    with pytest.raises(DeviceError, match=f"{DEEP} computes wrong on here"):
        check_requests(Wrong, SMALL, "here")
    with pytest.raises(DeviceError, match="backend cuda has no kernel of deep positions for"):
        check_requests(Missing, SMALL, "here")
