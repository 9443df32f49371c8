"""Prompts that the library runs on several ranks, before the CUDA kernel's own C++ on a CPU: what requests say behind
them, and the keys and values that each rank holds.

By definition those of the kernel's own prompt, but for rounding; and whatever happens to a request or beside it, bit
for bit what it says and leaves alone. The pass alone: tests/host/test_rank_prefill.py.
"""

from types import SimpleNamespace

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.memory import HALF
from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.prefill.ranks import RankPrefill
from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import Head
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import error_of, prompt_of, request, run, serve, timeless
from tests.lib.cuda_walk import FiberBackend
from tests.lib.lowering_cases import ArrayWeights, mixed_lanes
from tests.lib.narrow_stages import LARGE
from tests.lib.narrow_stream import NarrowWeights, narrow_spec
from tests.lib.ring_walker import f16_spec

TWO = f16_spec(vocab_size=100)
TOLD = SamplingParams(temperature=0, logprobs=3)
CHUNK = 7
NARROW = LARGE | {"intermediate_size": 1024, "vocab_size": 100}
SHORT, LONG = (5, 6), tuple(n % 100 for n in prompt_of(23))


def opened(spec=TWO, ranks=2, prefill="library"):
    asked = BackendOptions(num_slots=3, num_gpus=ranks, prefill=prefill)
    backend = FiberBackend(RandomWeights(spec), asked, 2)
    if backend.library is not None:
        assert isinstance(backend.library, RankPrefill)
        backend.library.chunk = CHUNK
    return backend


def caches(backend, slot, positions):
    return [m.cache[slot][..., :positions, :].clone() for m in backend.ranks.each]


def equal(ones, others):
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


@pytest.fixture(scope="module")
def backend():
    return opened()


@pytest.fixture(scope="module")
def alone(backend):
    """{prompt: (steps, keys and values by rank)} of requests of 4 tokens alone."""
    out = {}
    for prompt in (SHORT, LONG):
        out[prompt] = (run(backend, request(0, prompt, 4, TOLD))[0], caches(backend, 0, len(prompt) + 3))
    return out


@pytest.mark.parametrize(
    ("spec", "ranks"), [(TWO, 2), (mixed_lanes(Head.SUM_THEN_NORM), 4)], ids=["two", "lanes on four"]
)
def test_it_is_the_kernels_own_prompt_but_for_rounding(spec, ranks):
    ours, own = opened(spec, ranks), opened(spec, ranks, "kernel")
    heads, rounding = ours.first.heads.take(), torch.finfo(HALF[spec.dtype]).eps
    for n, (slot, prompt) in enumerate(((2, LONG[:5]), (0, LONG))):
        steps = run(ours, request(slot, prompt, 3, TOLD))[slot]
        want = run(own, request(slot, prompt, 3, TOLD))[slot]
        assert heads.launches == n + 1
        assert [s.token for s in steps] == [s.token for s in want]
        for step, other in zip(steps, want, strict=True):
            top, theirs = dict(step.top), dict(other.top)
            assert top == {token: pytest.approx(theirs[token], abs=30 * rounding) for token in top}
        pairs = zip(caches(ours, slot, len(prompt) + 2), caches(own, slot, len(prompt) + 2), strict=True)
        for held, other in pairs:
            assert (held.float() - other.float()).norm() < 4 * rounding * other.float().norm()


def test_a_request_gets_tokens_between_slices_and_both_say_what_they_say_alone(backend, alone, monkeypatch):
    right, launches = PromptRun.advance, []

    def advance(self, seconds, at_once=False):
        launches.append(backend.kernel.launches + backend.first.heads.take().launches)
        return right(self, 0.0, at_once)

    monkeypatch.setattr(PromptRun, "advance", advance)
    steps = run(backend, request(0, SHORT, 4, TOLD), request(1, LONG, 4, TOLD))
    for slot, prompt in enumerate((SHORT, LONG)):
        said, left = alone[prompt]
        assert steps[slot] == said and equal(caches(backend, slot, len(prompt) + 3), left)
    assert len(set(launches)) > 4  # the short one's tokens came between slices of the long one


def test_a_cancelled_prompt_keeps_what_all_ranks_had_filled(backend, alone, monkeypatch):
    mailbox, right = Mailbox(), PromptRun.advance

    def advance(self, seconds, at_once=False):
        ended = right(self, 0.0, at_once)
        if self.filled == 2 * CHUNK:
            mailbox.cancel(1)
        return ended

    with monkeypatch.context() as patched:
        patched.setattr(PromptRun, "advance", advance)
        mailbox.post(request(1, LONG, 4, TOLD))
        backend.generate(mailbox)
    (last,) = mailbox.read(1, 0)
    assert (last.finish, last.held) == ("cancel", 2 * CHUNK)
    said, left = alone[LONG]
    assert run(backend, request(1, LONG, 4, TOLD, cached=2 * CHUNK))[1] == said
    assert equal(caches(backend, 1, len(LONG) + 3), left)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_pass_fails_ends_its_request_alone(backend, alone, monkeypatch, rank):
    """In the midst of a chunk, when other ranks may have gone a product further."""
    matrices, calls = backend.library._passes[rank].matrices, []
    right = matrices.product

    def product(*arguments):
        calls.append(arguments)
        if len(calls) == 6:
            raise torch.OutOfMemoryError(f"rank {rank} is out of memory")
        return right(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(matrices, "product", product)
        steps = serve(backend, request(0, LONG, 4, TOLD), request(1, SHORT, 4, TOLD))
    assert f"rank {rank} is out of memory" in str(error_of(steps[0]))
    assert timeless(steps[1]) == alone[SHORT][0]
    said, left = alone[LONG]
    assert run(backend, request(0, LONG, 4, TOLD))[0] == said
    assert equal(caches(backend, 0, len(LONG) + 3), left)


def test_a_prompt_that_is_void_ends_its_own_request(backend, alone):
    table = [walk.embed.table[99].clone() for walk in backend.library._passes]
    try:
        for walk in backend.library._passes:
            walk.embed.table[99, 3] = torch.nan
        bad = (*LONG[:5], 99, *LONG[6:])
        steps = serve(backend, request(0, bad, 4, TOLD), request(1, SHORT, 4, TOLD))
    finally:
        for walk, row in zip(backend.library._passes, table, strict=True):
            walk.embed.table[99] = row
    assert "hold NaN or +inf: the run is void" in str(error_of(steps[0]))
    assert timeless(steps[1]) == alone[SHORT][0]


def test_what_the_library_holds_on_all_ranks_is_counted():
    ours, own = opened().memory_bytes(), opened(prefill="kernel").memory_bytes()
    held = opened().library.memory_bytes()
    assert held > 0 and ours["other"] == own["other"] + held
    assert (ours["weights"], ours["kv_cache"]) == (own["weights"], own["kv_cache"])


@pytest.mark.parametrize("how", ["int8-channel", "int4-g128"])
def test_a_prompt_of_narrow_weights_leaves_what_that_of_their_values_leaves(how):
    """On every rank, whose rows have scales of their own."""
    narrow = NarrowWeights(spec := narrow_spec(FORMATS[how], **NARROW), ArrayWeights(spec))
    left = []
    for weights in (narrow, SimpleNamespace(spec=spec.replace(narrow=()), load=narrow.load)):
        backend = FiberBackend(weights, BackendOptions(num_gpus=2, prefill="library"), 3)
        backend.library.chunk = CHUNK
        assert run(backend, request(0, LONG, 2))
        left.append(caches(backend, 0, len(LONG)))
    assert equal(*left) and all(cache.abs().sum() > 0 for cache in left[0])
