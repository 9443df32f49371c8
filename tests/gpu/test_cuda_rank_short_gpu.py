"""Passes of short prompts on two GPUs: near the kernel's own prompt, the same bits whoever shares them and however late
either GPU comes, and a GPU that does not come is named."""

import random
import time

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import RunError
from kog_triton.model.shapes import named_shape
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import error_of, request, run, serve
from tests.lib.two_gpus import skip_without_two

pytestmark = pytest.mark.gpu
TOLD = SamplingParams(temperature=0, logprobs=5)
COUNT, LENGTHS = 6, (9, 33, 64, 100)
# Of log-probabilities; of other streams they differ by units (benchmarks/cuda-log.md#rank-passes).
ROUNDING = 2.0
SPEC = named_shape("qwen3-0.6b")


def opened(prefill):
    asked = BackendOptions(8, 512, num_gpus=2, device="nvidia", prefill=prefill)
    return CudaBackend(RandomWeights(SPEC, device="cuda"), asked)


@pytest.fixture(scope="module")
def backend():
    skip_without_two()
    made = opened("library")
    made.settle()
    assert made.short is not None and made.short._graphs
    yield made
    made.close()


def asked(slot, count=COUNT):
    prompt = np.random.default_rng(slot).integers(0, SPEC.vocab_size, LENGTHS[slot]).tolist()
    return request(slot, prompt, count, TOLD)


def left(backend, slot):
    return [m.cache[slot][..., : LENGTHS[slot] + COUNT - 1, :].cpu() for m in backend.ranks.each]


@pytest.fixture(scope="module")
def alone(backend):
    return {s: (run(backend, asked(s))[s], left(backend, s)) for s in range(len(LENGTHS))}


def assert_as_alone(backend, alone, steps, slots):
    for slot in slots:
        assert steps[slot] == alone[slot][0]
        assert all(torch.equal(a, b) for a, b in zip(left(backend, slot), alone[slot][1], strict=True))


def test_a_pass_is_near_the_kernels_own_prompt(backend, alone):
    own = opened("kernel")
    own.settle()
    for slot, (steps, caches) in alone.items():
        theirs = run(own, asked(slot))[slot]
        near = dict(theirs[0].top)
        common = [abs(p - near[token]) for token, p in steps[0].top if token in near]
        assert len(common) >= 3 and max(common) < ROUNDING
        for mine, other in zip(caches, left(own, slot), strict=True):
            mine, other = (t[..., : LENGTHS[slot], :].float() for t in (mine, other))
            assert other.std() > 0.1 and (mine - other).norm() < 0.1 * other.norm()
    own.close()


def test_prompts_share_a_pass_and_keep_their_bits(backend, alone):
    for order in ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0)):
        steps = run(backend, *(asked(slot) for slot in order))
        assert_as_alone(backend, alone, steps, order)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
def test_gpus_held_up_at_random_change_nothing(backend, alone, monkeypatch, graphs):
    draws, right = random.Random(0), backend.short._on

    def on(one, act):
        if draws.random() < (0.5 if graphs else 0.05):
            with torch.cuda.device(one.device):
                torch.cuda._sleep(draws.randrange(2_000_000 if graphs else 100_000))
        return right(one, act)

    monkeypatch.setattr(backend.short, "_on", on)
    if not graphs:
        monkeypatch.setattr(backend.short, "_graphs", {})
    for _ in range(100 if graphs else 10):
        slots = draws.sample(range(4), draws.randint(1, 4))
        assert_as_alone(backend, alone, run(backend, *(asked(slot) for slot in slots)), slots)


def test_a_thousand_passes_say_the_same(backend, alone):
    for i in range(1000):
        slot = i % 4
        assert run(backend, asked(slot, 1))[slot][0].token == alone[slot][0][0].token


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gpu_that_does_not_come_is_named_and_the_next_request_runs(backend, alone, monkeypatch, rank):
    one = backend.short._passes[rank]
    nothing = [lambda stream: None]
    with monkeypatch.context() as patched:
        patched.setattr(backend.short, "_graphs", {})
        patched.setattr(one, "launches", lambda kernel: nothing * len(one._launches[kernel]))
        begun = time.monotonic()
        error = error_of(serve(backend, asked(1))[1])
        assert 2 < time.monotonic() - begun < 8
    assert isinstance(error, RunError)
    assert str(error).startswith(f"a wait of a prompt's pass expired: rank {1 - rank}, layer 0, attention_out, token ")
    assert str(error).endswith(f": nothing from rank {rank}")
    assert_as_alone(backend, alone, run(backend, asked(1)), [1])
