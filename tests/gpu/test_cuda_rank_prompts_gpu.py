"""Prompts that the library runs on two ranks of the CUDA backend: both on one GPU, half of its SMs each for the kernel,
and on two GPUs.

Keys, values and first tokens are near those of the kernel's own prompt; and in slices beside others, behind a cancel,
again and again and with GPUs held up at random, they are the same, bit for bit.
"""

import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.prefill.ranks import RANK_BUCKETS, RankPrefill
from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType, Head
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import error_of, request, run, serve, timeless
from tests.lib.gpu_ranks import SharedBackend
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.machine_code import spec_named
from tests.lib.narrow_stages import LARGE
from tests.lib.narrow_stream import narrow_spec
from tests.lib.ring_walker import spec_of
from tests.lib.two_gpus import skip_without_two

pytestmark = pytest.mark.gpu
TOLD = SamplingParams(temperature=0, logprobs=5)
COUNT, CHUNK = 6, 128
# Most that keys and values of the library and of the kernel are apart, over their own norm, and log-probabilities of
# first tokens. Rounding alone, in bfloat16 and in float32 on a CPU, takes 1B's 0.3 to 0.9 apart
# (benchmarks/cuda-log.md#rank-passes); other streams or weights, units.
NARROW = LARGE | {"intermediate_size": 1024, "vocab_size": 100, "max_context": 2048}
SPECS = {
    "biases, norms, windows": (
        spec_of(
            dtype=DType.F16, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
            windows=(5, 0, 90), vocab_size=100, max_context=2048,
        ),
        0.004, 0.3,
    ),
    "lanes, sum": (mixed_lanes(Head.SUM_THEN_NORM, max_context=2048), 0.004, 0.3),
    "lanes, vocab parallel": (mixed_lanes(Head.VOCAB_PARALLEL, max_context=2048), 0.004, 0.3),
    "int8 channels": (narrow_spec(FORMATS["int8-channel"], **NARROW), 0.03, 0.3),
    "int4 g128": (narrow_spec(FORMATS["int4-g128"], **NARROW), 0.03, 0.3),
    "laneformer-2b": (spec_named("laneformer-2b"), 0.02, 0.3),
    "llama-3.2-1b": (spec_named("llama-3.2-1b"), 0.1, 2.0),
}  # fmt: skip
SMALL = SPECS["biases, norms, windows"][0]


@pytest.fixture(scope="module", params=["one GPU", "two GPUs"])
def kind(request):
    if request.param == "one GPU":
        return SharedBackend
    skip_without_two()
    return CudaBackend


def opened(kind, spec, prefill="library", num_slots=1):
    asked = BackendOptions(num_slots, 2048, num_gpus=2, device="nvidia", prefill=prefill)
    made = NarrowRandomWeights if spec.narrow else RandomWeights
    return kind(made(spec, device="cuda"), asked)


def prompt_of(spec, count):
    return np.random.default_rng(count).integers(0, spec.vocab_size, count).tolist()


def held(backend, slot, positions):
    """Keys and values by rank."""
    return [m.cache[slot][..., :positions, :].cpu() for m in backend.ranks.each]


def left_by(backend, asked):
    """What a request alone says, and what it leaves in its slot on each rank."""
    steps = run(backend, asked)[asked.slot]
    return steps, held(backend, asked.slot, len(asked.prompt) + COUNT - 1)


def assert_same(left, expected):
    assert left[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(left[1], expected[1], strict=True))


@pytest.fixture(scope="module")
def small(kind):
    made = opened(kind, SMALL, num_slots=3)
    assert isinstance(made.library, RankPrefill)
    made.library.chunk, made.library._sizes = CHUNK, []  # in chunks, not padded
    yield made
    made.close()


@pytest.fixture(scope="module")
def padded(kind):
    """With graphs of padded passes."""
    if kind is SharedBackend:
        pytest.skip("ranks that wait for each other need a GPU each")
    made = opened(kind, SMALL, num_slots=3)
    made.settle()
    assert made.library._graphs.keys() == set(RANK_BUCKETS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def long(small):
    """A long prompt's request, and what it leaves alone."""
    asked = request(1, prompt_of(SMALL, 700), COUNT, TOLD)
    return asked, left_by(small, asked)


@pytest.mark.parametrize("name", SPECS)
def test_it_is_near_the_kernels_own_prompt(kind, name):
    spec, limit, apart = SPECS[name]
    left = {}
    for prefill in ("library", "kernel"):
        backend = opened(kind, spec, prefill)
        backend.settle()
        asked = [request(0, prompt_of(spec, n), COUNT, TOLD) for n in (9, 33, 600)]
        left[prefill] = [left_by(backend, one) for one in asked]
        if prefill == "library":
            assert backend.first.heads is not None
            for one, expected in zip(asked, left[prefill], strict=True):
                assert_same(left_by(backend, one), expected)
        backend.close()
        del backend
        torch.cuda.empty_cache()
    for one, ours, own in zip(asked, left["library"], left["kernel"], strict=True):
        for mine, other in zip(ours[1], own[1], strict=True):
            mine, other = (t[..., : len(one.prompt), :].float() for t in (mine, other))
            assert other.std() > 0.1 and (mine - other).norm() < limit * other.norm()
        near = dict(own[0][0].top)
        common = [abs(p - near[token]) for token, p in ours[0][0].top if token in near]
        assert len(common) >= 3 and max(common) < apart


def test_slices_beside_another_request_change_nothing(small, long):
    asked, expected = long
    beside = request(0, prompt_of(SMALL, 9), 200)
    alone = run(small, beside)[0]
    for _ in range(10):
        steps = run(small, beside, asked)
        assert steps[0] == alone
        assert_same((steps[1], held(small, 1, len(asked.prompt) + COUNT - 1)), expected)


def test_a_cancel_between_pieces_leaves_what_all_ranks_had_filled(small, long, monkeypatch):
    asked, expected = long
    mailbox, right = Mailbox(), PromptRun.advance

    def advance(self, seconds, at_once=False):
        ended = right(self, 0.0, at_once)
        if self.filled == 3 * CHUNK:
            mailbox.cancel(1)
        return ended

    with monkeypatch.context() as patched:
        patched.setattr(PromptRun, "advance", advance)
        mailbox.post(asked)
        small.generate(mailbox)
    (last,) = mailbox.read(1, 0)
    assert (last.finish, last.held) == ("cancel", 3 * CHUNK)
    assert_same(left_by(small, replace(asked, cached=last.held)), expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_pass_fails_ends_its_request_alone(small, long, monkeypatch, rank):
    asked, expected = long
    beside = request(0, prompt_of(SMALL, 9), COUNT)
    alone = run(small, beside)[0]
    matrices, calls = small.library._passes[rank].matrices, []
    right = matrices.product

    def product(*arguments):
        calls.append(arguments)
        if len(calls) == 11:
            raise torch.OutOfMemoryError(f"rank {rank} is out of memory")
        return right(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(matrices, "product", product)
        steps = serve(small, asked)
    assert f"rank {rank} is out of memory" in str(error_of(steps[1]))
    assert timeless(serve(small, beside)[0]) == alone
    assert_same(left_by(small, asked), expected)


def test_gpus_held_up_at_random_change_nothing(small, long, monkeypatch):
    """Each ahead of some of its products, by up to 0.2 ms: on two GPUs outputs come long before they are read on the
    other, and long after."""
    asked, expected = long
    draws = random.Random(0)

    def slowed(right):
        def product(layer, stage, x, bias):
            if draws.random() < 0.3:
                torch.cuda._sleep(draws.randrange(300_000))
            return right(layer, stage, x, bias)

        return product

    for walk in small.library._passes:
        monkeypatch.setattr(walk.matrices, "product", slowed(walk.matrices.product))
    for _ in range(20):
        assert_same(left_by(small, asked), expected)


def test_graphs_leave_what_launches_leave_however_late_a_gpu_is(padded, monkeypatch):
    library, draws = padded.library, random.Random(0)
    asked = [request(1, prompt_of(SMALL, n), COUNT, TOLD) for n in (300, 700, 1100)]
    expected = [left_by(padded, one) for one in asked]
    with monkeypatch.context() as patched:
        patched.setattr(library, "_graphs", {})
        for one, want in zip(asked, expected, strict=True):
            assert_same(left_by(padded, one), want)
    begin = library._exchange.begin

    def late():
        begin()
        with torch.cuda.device(draws.randrange(2)):
            torch.cuda._sleep(draws.randrange(4_000_000))

    monkeypatch.setattr(library._exchange, "begin", late)
    for _ in range(60):
        i = draws.randrange(3)
        assert_same(left_by(padded, asked[i]), expected[i])


def test_a_padded_prompt_beside_another_request_changes_nothing(padded):
    asked = request(1, prompt_of(SMALL, 700), COUNT, TOLD)
    expected = left_by(padded, asked)
    beside = request(0, prompt_of(SMALL, 9), 200)
    alone = run(padded, beside)[0]
    for _ in range(10):
        steps = run(padded, beside, asked)
        assert steps[0] == alone
        assert_same((steps[1], held(padded, 1, len(asked.prompt) + COUNT - 1)), expected)


def test_a_shorter_prompt_that_comes_while_a_padded_one_is_cut_changes_nothing(padded, monkeypatch):
    asked, shorter = (request(i, prompt_of(SMALL, n), COUNT, TOLD) for i, n in ((1, 700), (2, 300)))
    expected = [left_by(padded, one) for one in (asked, shorter)]
    mailbox, right, ends = Mailbox(), PromptRun.advance, []

    def advance(self, seconds, at_once=False):
        ends.append(self.end)
        if self.end == 700 and ends.count(700) == 4:
            mailbox.post(shorter)
        return right(self, seconds if self.short else 0.0, at_once)

    monkeypatch.setattr(PromptRun, "advance", advance)
    mailbox.post(request(0, prompt_of(SMALL, 9), 200))
    mailbox.post(asked)
    padded.generate(mailbox)
    assert ends.count(700) > 10 and 300 in ends
    for one, want in zip((asked, shorter), expected, strict=True):
        left = held(padded, one.slot, len(one.prompt) + COUNT - 1)
        assert_same((timeless(mailbox.read(one.slot, 0)), left), want)


def test_a_gpu_that_does_not_come_is_named_and_the_next_prompt_runs(padded, monkeypatch):
    asked = request(1, prompt_of(SMALL, 300), COUNT, TOLD)
    expected, end = left_by(padded, asked), padded.library._exchange.ends[1]
    with monkeypatch.context() as patched:
        patched.setattr(padded.library, "_graphs", {})
        patched.setattr(end, "_pushes", lambda stream: None)
        error = error_of(serve(padded, asked)[1])
    assert "a wait of a prompt's pass expired: rank 0, exchange 1: nothing from rank 1" in str(error)
    assert_same(left_by(padded, asked), expected)


def test_prompts_again_and_again_say_the_same(small, long):
    asked, expected = long
    for _ in range(200):
        assert run(small, asked)[1] == expected[0]
    assert_same(left_by(small, asked), expected)


def test_prompts_take_no_more_memory_each_time(small, long):
    asked, _ = long
    run(small, asked)
    before = [torch.cuda.memory_allocated(d) for d in small.devices]
    for _ in range(5):
        run(small, asked)
    assert [torch.cuda.memory_allocated(d) for d in small.devices] == before
    assert small.memory_bytes()["other"] > small.library.memory_bytes() > 0


@pytest.mark.parametrize("name", ["llama-3.2-1b", "laneformer-2b"])
def test_prompts_are_timed_by_the_library_and_in_chunks(kind, name):
    """With -s it also prints times to the first token; on one GPU ranks take turns in the library, and chunks have half
    of its SMs a rank."""
    spec = spec_named(name)
    backend = opened(kind, spec, "auto")
    backend.settle()
    for count in (33, 65, 129, 257, 513, 1793):
        best = {}
        for prefill in ("library", "kernel"):
            backend.options = replace(backend.options, prefill=prefill)
            times = []
            for _ in range(4):
                begun = time.perf_counter()
                (step,) = run(backend, request(0, prompt_of(spec, count), 1))[0]
                times.append(time.perf_counter() - begun)
                assert step.token >= 0
            best[prefill] = min(times) * 1e3
        print(f"{name}, {count} tokens: {best['library']:.2f} ms by the library, {best['kernel']:.2f} in chunks")
    backend.close()
