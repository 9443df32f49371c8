"""Requests whose prompt a library has run: the kernel's first step begins at the head, its own C++ on a CPU.

Logits are those of the streams that the library left, by definition; and whoever is beside a request, its tokens,
log-probabilities, keys and values are those that it has alone.
"""

import time

import pytest
import torch

from kog_triton.backends import BackendOptions, serving
from kog_triton.backends.cuda import launcher
from kog_triton.backends.cuda.memory import HALF
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import Head
from kog_triton.sampling import SamplingParams
from tests.lib.column_cases import ALLOWED, EXTRAS, MIXED, ODD
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import at_token, error_of, held, idle, prompt_of, request, run, serve, timeless
from tests.lib.cuda_walk import ColumnBackend, FiberBackend, compile_walk
from tests.lib.prefill_cases import SPECS as PREFILLED
from tests.lib.ring_walker import f16_spec, spec_of
from tests.lib.slow import some_always

TOLD = SamplingParams(temperature=0, logprobs=3)
MODELS = {
    "fp16, biases, norms, tied": f16_spec(**EXTRAS, tied_embeddings=True),
    "bf16, windows": spec_of(windows=(5, 0, 17), num_layers=3),
    "sizes that divide by nothing": ODD,
    "lanes": PREFILLED["lanes of all kinds"].replace(dtype=f16_spec().dtype),
    "lanes, side by side": PREFILLED["lanes at once"].replace(dtype=f16_spec().dtype, head=Head.CONCAT),
}
SPEC = f16_spec(num_layers=2)


def opened(spec=SPEC, num_slots=3, kind=FiberBackend, num_blocks=2, seed=0, **options):
    told = BackendOptions(num_slots=num_slots, prefill="library")
    return kind(RandomWeights(spec), told, num_blocks, seed, **options)


def launches_of(backend, monkeypatch):
    """The slots of each launch from now on, and whether it is one of first tokens."""
    told, run, heads = [], backend._launch_slots, backend._launch_heads

    def launch(slots, *others):
        told.append((False, list(slots)))
        return run(slots, *others)

    def first(slots, *others):
        told.append((True, list(slots)))
        return heads(slots, *others)

    monkeypatch.setattr(backend, "_launch_slots", launch)
    monkeypatch.setattr(backend, "_launch_heads", first)
    return told


def said_of(step):
    return step.token, step.logprob, step.top, step.rank


@pytest.fixture(scope="module")
def alone():
    """Of each prompt: all that a request says alone, for 4 tokens, and what it leaves in its slot."""
    backend, out = opened(), {}
    for prompt in (tuple(prompt_of(n, n)) for n in (9, 4, 23)):
        steps = run(backend, request(0, prompt, 4, TOLD))[0]
        out[prompt] = steps, backend.memory.cache[0, ..., : len(prompt) + 3, :].clone()
    return out


# ---- one request ----


@pytest.mark.parametrize("name", some_always(MODELS, "bf16, windows", "sizes that divide by nothing", "lanes"))
def test_the_first_logits_are_those_of_the_streams(name, monkeypatch):
    """As the head is defined; they, and the prompt's keys and values, are those of the kernel's own prompt."""
    spec = MODELS[name]
    blocks = 2 * spec.num_lanes
    backend = opened(spec, num_blocks=blocks)
    told = launches_of(backend, monkeypatch)
    reference = ReferenceBackend(RandomWeights(spec), BackendOptions())
    own = FiberBackend(RandomWeights(spec), BackendOptions(num_slots=3), blocks)
    for slot, count in ((2, 5), (0, 17)):
        prompt = prompt_of(count)
        steps = run(backend, request(slot, prompt, 3, TOLD))[slot]
        x = backend.memory.streams[slot, :, None, : spec.hidden_size]
        if spec.num_lanes > 1:
            x = reference.run_stage("mix", 0, {"x": x})["y"]
        logits = reference.run_stage("lm_head", 0, {"x": x, "y": x})["logits"]
        logprobs = torch.as_tensor(logits).reshape(-1).log_softmax(0)
        assert steps[0].token == int(logprobs.argmax())
        assert abs(steps[0].logprob - float(logprobs.max())) < 2e-2
        assert told == [(True, [slot]), (False, [slot])]
        told.clear()
        want = run(own, request(slot, prompt, 3, TOLD))[slot]
        rounding = torch.finfo(HALF[spec.dtype]).eps
        ours, theirs = dict(steps[0].top), dict(want[0].top)
        assert ours == {token: pytest.approx(theirs[token], abs=30 * rounding) for token in ours}
        ours, theirs = (held(b, slot, count).float() for b in (backend, own))
        assert (ours - theirs).norm() < 3 * rounding * theirs.norm()


def test_the_first_token_is_chosen_in_every_way():
    for n, (name, params) in enumerate(MIXED.items()):
        asked = request(0, prompt_of(6 + n, n), 4, params, mask=(lambda _: ALLOWED) if name == "masked" else None)
        own = FiberBackend(RandomWeights(SPEC), BackendOptions())
        ours, want = (run(backend, asked)[0] for backend in (opened(), own))
        assert [s.token for s in ours] == [s.token for s in want], name


# ---- several ----


def assert_each_says_what_it_says_alone(alone, backend, told):
    """The first of them one token; one launch makes the first tokens, though one ends its request."""
    counts = dict(zip(alone, (1, 4, 3), strict=True))
    asked = [request(i, prompt, n, TOLD) for i, (prompt, n) in enumerate(counts.items())]
    steps = run(backend, *asked)
    for slot, (prompt, count) in enumerate(counts.items()):
        want, cache = alone[prompt]
        assert [said_of(s) for s in steps[slot]] == [said_of(s) for s in want[:count]]
        positions = len(prompt) + count - 1
        assert torch.equal(held(backend, slot, positions), cache[..., :positions, :])
    assert [slots for first, slots in told if first] == [[0, 1, 2]] and told[0][0]


@pytest.mark.parametrize("kind", [FiberBackend, ColumnBackend])
def test_several_begin_in_one_launch_and_go_on_together(alone, monkeypatch, kind):
    backend = opened(kind=kind, seed=-3)
    told = launches_of(backend, monkeypatch)
    assert_each_says_what_it_says_alone(alone, backend, told)
    steps = [kernel.kernel.launches for kernel in backend.first_tokens.kernels]
    assert steps == ([1] if kind is ColumnBackend else [])


@pytest.mark.parametrize("name", ["fp16, biases, norms, tied", "sizes that divide by nothing"])
def test_first_tokens_of_one_step_are_those_of_steps_of_their_own(name):
    """Chosen in every way."""
    spec = MODELS[name]
    asked = [
        request(n, prompt_of(4 + n, n), 2, params, mask=(lambda _: ALLOWED) if how == "masked" else None)
        for n, (how, params) in enumerate(MIXED.items())
    ]
    apart, together = (opened(spec, len(asked), kind, seed=4) for kind in (FiberBackend, ColumnBackend))
    want, got = run(apart, *asked), run(together, *asked)
    for n in range(len(asked)):
        assert [said_of(s) for s in got[n]] == [said_of(s) for s in want[n]]
    (kernel,) = together.first_tokens.kernels
    assert kernel.kernel.launches == 1
    assert together.first.heads.take().launches == 0


def test_one_that_joins_gets_its_first_token_in_a_launch_of_its_own(alone, monkeypatch):
    first, second, _ = alone
    backend = opened(seed=5)
    told = launches_of(backend, monkeypatch)
    server = idle(backend)
    at_token(server, 0, 2, lambda: server.post(request(1, second, 4, TOLD)))
    server.post(request(0, first, 4, TOLD))
    server.start()
    steps = server.finish()
    for slot, prompt in enumerate((first, second)):
        assert timeless(steps[slot]) == alone[prompt][0]
    assert [slots for first, slots in told if first] == [[0], [1]]


def test_launches_of_one_step_change_nothing(alone, monkeypatch):
    monkeypatch.setattr(launcher, "_most_steps", lambda running, slots: 1)
    backend = opened(seed=2)
    for prompt, (want, cache) in alone.items():
        assert run(backend, request(1, prompt, 4, TOLD))[1] == want
        assert torch.equal(backend.memory.cache[1, ..., : len(prompt) + 3, :], cache)


def test_a_prompt_that_is_void_ends_its_own_request(alone):
    first, second, _ = alone
    backend = opened()
    backend.memory.embed[99, 3] = torch.nan
    bad = tuple(99 if i == 5 else token for i, token in enumerate(prompt_of(9, 2)))
    asked = (request(0, first, 4, TOLD), request(1, bad, 4), request(2, second, 4, TOLD))
    steps = serve(backend, *asked)
    assert "hold NaN or +inf: the run is void" in str(error_of(steps[1]))
    assert [timeless(steps[slot]) for slot in (0, 2)] == [alone[p][0] for p in (first, second)]


def test_a_mask_that_is_late_behind_the_head_is_waited_for(alone, monkeypatch):
    monkeypatch.setattr(serving, "MASK_S", 60.0)
    backend = opened()
    backend.wait_ns = 2000  # rounds
    asked = [
        request(slot, prompt, 4, TOLD, mask=lambda out: time.sleep(0.6 if len(out) == 1 else 0))
        for slot, prompt in enumerate(alone)
    ]
    steps = serve(backend, *asked)
    assert [timeless(steps[slot]) for slot in range(3)] == [said for said, _ in alone.values()]


# ---- planted faults ----

STEPS, STEP = FiberBackend, ColumnBackend
FAULTS = {
    "weights of the layers": (
        STEPS, "produce.h", "Stream stream(b, first, slots)", "Stream stream(b, 0, slots)",
    ),
    "a launch that ends with the first of several": (
        STEPS, "head_steps.h", "< b.p.num_requests) return", "< 1) return",
    ),
    "the streams of slot 0": (
        STEPS, "head_steps.h", "static_cast<u64>(slot) * kLanes", "static_cast<u64>(slot) * 0",
    ),
    "gains of another norm": (STEPS, "head_steps.h", "load_gains(b, 2 * kLayers", "load_gains(b, 0"),
    "a request's words of another": (
        STEPS, "head_steps.h", "select_request(b, cursor", "select_request(b, b.small->cursors[0]",
    ),
    "one step, weights of the layers": (
        STEP, "produce.h", "Stream stream(b, first, slots)", "Stream stream(b, 0, slots)",
    ),
    "one step, the streams of one request": (
        STEP, "columns/stream.h", "cursors[column].slot) * kLanes", "cursors[0].slot) * kLanes",
    ),
    "one step, streams of the layers": (
        STEP, "columns/head_step.h", "run_head<FromSlots>", "run_head<FromLayers>",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(alone, monkeypatch, tmp_path, name):
    kind, *fault = FAULTS[name]
    backend = opened(kind=kind)
    kernel = backend.first.heads.take()
    if kind is STEP:
        kernel = backend.first_tokens.take(3, backend.devices).kernel
    kernel.library = compile_walk(kernel.layout, kernel.flags, plant(tmp_path, tuple(fault)))
    told = launches_of(backend, monkeypatch)
    with pytest.raises(AssertionError):
        assert_each_says_what_it_says_alone(alone, backend, told)
