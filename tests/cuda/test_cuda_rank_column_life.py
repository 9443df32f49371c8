"""Requests that share steps, and prompts in chunks, on ranks of the CUDA backend: the kernels' own C++ on a CPU, all
ranks' blocks as fibers (tests/gpu/test_cuda_rank_life_gpu.py: on GPUs).

Whoever a request shares steps with, its tokens, and the keys and values that it leaves on each rank, are those of the
same request alone on the kernel of one token.
"""

import re

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import RunError
from kog_triton.model.spec import Head
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import ended, error_of, interrupt, prompt_of, request, run, serve, timeless
from tests.lib.cuda_walk import BothBackend, FiberBackend
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.ring_walker import f16_spec

TWO = f16_spec(vocab_size=102)
COUNT, WAIT = 8, 2000  # rounds, where a wait is to expire
DRAWN = SamplingParams(temperature=2.0, seed=7, top_p=0.9)
REQUESTS = [
    request(0, prompt_of(5), COUNT),
    request(1, prompt_of(20, 5), COUNT, DRAWN),
    request(2, prompt_of(2, 9), COUNT),
]


def opened(kind, spec=TWO, ranks=2, **options):
    asked = BackendOptions(num_slots=3, num_gpus=ranks)
    return kind(RandomWeights(spec), asked, 2, **options)


def caches(backend, slot, positions):
    return [m.cache[slot][..., :positions, :].clone() for m in backend.ranks.each]


def alone(spec=TWO, ranks=2):
    """{slot: (steps, keys and values by rank)} of REQUESTS one by one on the kernel of one token."""
    backend, out = opened(FiberBackend, spec, ranks), {}
    for r in REQUESTS:
        steps = run(backend, r)[r.slot]
        out[r.slot] = steps, caches(backend, r.slot, len(r.prompt) + COUNT - 1)
    return out


@pytest.fixture(scope="module")
def expected():
    return alone()


@pytest.fixture(scope="module")
def backend():
    return opened(BothBackend, counts=(4,))


def assert_alone(backend, said, expected):
    for r in REQUESTS:
        steps, left = expected[r.slot]
        assert timeless(said[r.slot]) == steps
        assert all(map(torch.equal, caches(backend, r.slot, len(r.prompt) + COUNT - 1), left))


@pytest.mark.parametrize(
    ("spec", "ranks"),
    [
        (TWO, 2),
        pytest.param(mixed_lanes(Head.SUM_THEN_NORM), 4, marks=pytest.mark.slow),
        pytest.param(f16_spec(num_heads=8, intermediate_size=90, vocab_size=104), 4, marks=pytest.mark.slow),
    ],
    ids=["two ranks", "lanes", "four ranks"],
)  # fmt: skip
def test_requests_share_steps_and_prompts_run_in_chunks(spec, ranks, expected):
    backend = opened(BothBackend, spec, ranks, counts=(4,))
    assert_alone(backend, serve(backend, *REQUESTS), expected if spec is TWO else alone(spec, ranks))
    (columns,) = backend.columns.kernels
    assert columns.kernel.launches > 0
    assert backend.chunks.kernel.kernel.launches == 2  # the third prompt is too short for any


def test_a_yield_returns_at_a_step_and_all_resume(backend, expected, monkeypatch):
    server = interrupt(backend, monkeypatch, Mailbox.yield_now, *REQUESTS)
    assert not any(ended(steps) for steps in server.finish().values())
    backend.forward_logits([1, 2, 3])  # leaves all slots alone
    server.mailbox.resume()
    server.start()
    assert_alone(backend, server.finish(), expected)


def test_a_cancel_ends_one_of_them(backend, expected, monkeypatch):
    server = interrupt(backend, monkeypatch, lambda mailbox: mailbox.cancel(0), *REQUESTS)
    steps = server.finish()
    assert steps[0][-1].finish == "cancel" and len(steps[0]) < COUNT
    for slot in (1, 2):
        assert timeless(steps[slot]) == expected[slot][0]


@pytest.mark.parametrize("kernel", ["columns", "chunks"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_never_launched_is_named_and_the_next_requests_run(backend, expected, monkeypatch, kernel, rank):
    if kernel == "chunks":
        asked, faulty = [REQUESTS[1]], backend.chunks.kernel
    else:
        asked = [request(i, prompt_of(2, i), COUNT) for i in range(2)]
        faulty = backend.columns.take(2, backend.devices)
    with monkeypatch.context() as patched:
        patched.setattr(backend, "wait_ns", WAIT)
        patched.setattr(faulty.kernel, "absent_rank", rank)
        errors = [error_of(steps) for steps in serve(backend, *asked).values()]
    for error in errors:
        assert isinstance(error, RunError)
        assert re.fullmatch(
            rf"a wait of the kernel expired: rank {1 - rank}, block \d, layer 0, delayed_outputs, word \d+ of "
            rf"attention_out_sent, seen 0, wanted 1, after 0 steps; the kernel of rank {rank} told nothing after 0 "
            "steps",
            str(error),
        )
    assert_alone(backend, serve(backend, *REQUESTS), expected)
