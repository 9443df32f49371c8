"""Passes of short prompts on two ranks, the kernels' own C++ on a CPU.

Keys, values and answers are those of the kernel's own prompt but for rounding, a prompt's bits are the same whoever
shares its pass, and a rank that does not come is named.
"""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Failure
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import RunError
from kog_triton.model.spec import DType
from tests.lib.cuda_walk import FiberBackend
from tests.lib.ring_walker import spec_of
from tests.lib.short_pass import PassBackend
from tests.lib.short_requests import PROMPTS, asked, said, served

SPEC = spec_of(
    hidden_size=128, intermediate_size=256, num_heads=8, num_kv_heads=4, head_dim=32, num_layers=2,
    vocab_size=64, dtype=DType.F16, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, max_context=300,
)  # fmt: skip


def opened(kind=PassBackend, prefill="library"):
    return kind(RandomWeights(SPEC), BackendOptions(num_slots=4, num_gpus=2, prefill=prefill))


def left(backend, slot):
    """Of every rank."""
    end = len(PROMPTS[slot]) + 2
    return [m.cache[slot][..., :end, :].clone() for m in backend.ranks.each]


@pytest.fixture(scope="module")
def backend():
    return opened()


@pytest.fixture(scope="module")
def alone(backend):
    found = {slot: (said(served(backend, asked(slot)), slot), left(backend, slot)) for slot in (1, 2)}
    assert backend.passes == [[1], [2]]
    streams = [m.streams[1] for m in backend.ranks.each]
    assert torch.equal(streams[0][0], streams[1][1])  # each rank's own place, with equal bits
    return found


def test_a_pass_leaves_what_the_kernel_leaves_rounding_apart(alone):
    own = opened(FiberBackend, "decode")
    tokens, caches = alone[1]
    assert said(served(own, asked(1)), 1) == tokens
    count = len(PROMPTS[1])
    for ours, theirs in zip(caches, left(own, 1), strict=True):
        ours, theirs = (t[..., :count, :].float() for t in (ours, theirs))
        assert (ours - theirs).norm() < 4e-3 * theirs.norm()
    own.close()


def test_prompts_that_wait_share_a_pass_and_keep_their_bits(backend, alone):
    backend.passes.clear()
    for memory in backend.ranks.each:
        memory.cache.zero_()
    mailbox = served(backend, asked(2), asked(1))
    assert backend.passes == [[2, 1]]
    for slot, (tokens, caches) in alone.items():
        assert said(mailbox, slot) == tokens
        assert all(torch.equal(a, b) for a, b in zip(left(backend, slot), caches, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_named_and_the_next_request_runs(backend, alone, monkeypatch, rank):
    one = backend.short._passes[rank]
    with monkeypatch.context() as patched:
        patched.setattr(one, "launches", lambda kernel: [lambda stream: None] * len(one._launches[kernel]))
        (failure,) = served(backend, asked(1)).read(1, 0)
    assert isinstance(failure, Failure) and isinstance(failure.error, RunError)
    assert str(failure.error) == (
        f"a wait of a prompt's pass expired: rank {1 - rank}, layer 0, attention_out, token 0: nothing from rank {rank}"
    )
    assert said(served(backend, asked(1)), 1) == alone[1][0]


def test_nothing_of_another_engine_comes_between(backend):
    run = backend.short.begin(asked(1))
    assert run.meets and not opened_on_one().short.begin(asked(1)).meets


def opened_on_one():
    return PassBackend(RandomWeights(SPEC), BackendOptions(num_slots=4, prefill="library"))
