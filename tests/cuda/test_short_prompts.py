"""Short prompts of requests on the CUDA backend, its own C++ on a CPU: those that wait share a pass, and each gets
the bits that it gets alone."""

from dataclasses import replace

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import backend as cuda_backend
from kog_triton.backends.cuda import placing, short_prompts, staging
from kog_triton.backends.cuda.prompt_texts import can_pass
from kog_triton.backends.cuda.short_pass import MOST_TOKENS, workspace_bytes
from kog_triton.backends.mailbox import Failure, Mailbox
from kog_triton.backends.prefill.upload import upload
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu
from tests.lib.cuda_walk import FiberBackend
from tests.lib.ring_walker import spec_of
from tests.lib.short_pass import PassBackend
from tests.lib.short_requests import PROMPTS, asked, said, served

SPEC = spec_of(
    hidden_size=128, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=32, num_layers=2,
    vocab_size=64, dtype=DType.F16, qkv_bias=True, qk_norm=True, max_context=300,
)  # fmt: skip


def opened(kind=PassBackend, prefill="library"):
    return kind(RandomWeights(SPEC), BackendOptions(num_slots=4, prefill=prefill))


def left(backend, slot):
    return backend.memory.cache[slot][..., : len(PROMPTS[slot]) + 2, :].clone()


@pytest.fixture(scope="module")
def alone():
    """What each says and leaves, and the passes that they took."""
    backend, found = opened(), {}
    for slot in PROMPTS:
        mailbox = served(backend, asked(slot))
        found[slot] = said(mailbox, slot), left(backend, slot)
    assert backend.passes == [[slot] for slot in PROMPTS]
    backend.close()
    return found


def test_a_pass_leaves_what_the_kernel_leaves_rounding_apart(alone):
    backend = opened(FiberBackend, "decode")
    for slot, (_, cache) in alone.items():
        served(backend, asked(slot))
        count = len(PROMPTS[slot])  # behind it answers may differ
        own, ours = left(backend, slot)[..., :count, :], cache[..., :count, :]
        assert (ours.float() - own.float()).norm() < 4e-3 * own.float().norm()
    backend.close()


def test_prompts_that_wait_share_a_pass_and_keep_their_bits(alone):
    backend = opened()
    backend.memory.cache.zero_()
    mailbox = served(backend, *(asked(slot) for slot in (3, 0, 2, 1)))
    assert backend.passes == [[3, 0, 2, 1]]
    for slot, (tokens, cache) in alone.items():
        assert said(mailbox, slot) == tokens and torch.equal(left(backend, slot), cache)
    backend.close()


@pytest.mark.parametrize(("room", "uploads"), [(staging.STAGED, 0), (64, 9)])
def test_requests_that_were_admitted_together_lie_in_their_slots_without_an_upload(alone, monkeypatch, room, uploads):
    """Or, where that has no room for them, by an upload a part."""
    told = []
    monkeypatch.setattr(placing, "upload", lambda values, to: (told.append(1), upload(values, to)))
    monkeypatch.setattr(staging, "STAGED", room)
    backend = opened()
    mailbox = served(backend, *(asked(slot) for slot in (2, 0, 1)))
    assert len(told) == uploads
    assert [said(mailbox, slot) for slot in (0, 1, 2)] == [alone[slot][0] for slot in (0, 1, 2)]
    backend.close()


def test_those_that_come_beside_a_stream_share_one_between_its_tokens(alone):
    backend, mailbox, told = opened(), Mailbox(), []

    def push(slot, step):
        told.append((slot, len(backend.passes)))
        if len(told) == 2:
            for other in (1, 2, 3):
                mailbox.post(asked(other))
        Mailbox.push(mailbox, slot, step)

    mailbox.push = push
    mailbox.post(asked(0, count=12))
    backend.generate(mailbox)
    assert backend.passes == [[0], [1, 2, 3]]
    assert {passes for slot, passes in told if slot == 0} == {1, 2}  # tokens before it and behind
    for slot in (1, 2, 3):
        tokens, cache = alone[slot]
        assert said(mailbox, slot) == tokens and torch.equal(left(backend, slot), cache)
    assert said(mailbox, 0)[:3] == alone[0][0]
    backend.close()


def test_what_does_not_fit_a_pass_takes_the_next(alone, monkeypatch):
    backend = opened()
    right = backend.short.fits
    monkeypatch.setattr(
        backend.short, "fits", lambda prompts: right(prompts) and sum(len(p.tokens) for p in prompts) <= 40
    )
    mailbox = served(backend, *(asked(slot) for slot in (3, 2, 1, 0)))
    assert backend.passes == [[3, 1, 0], [2]]
    assert {slot: said(mailbox, slot) for slot in alone} == {s: t for s, (t, _) in alone.items()}
    backend.close()


def test_a_request_that_was_cancelled_while_it_waited_leaves_its_slot_alone(alone):
    backend, mailbox = opened(), Mailbox()
    for slot in PROMPTS:
        mailbox.post(asked(slot))
    mailbox.cancel(2)
    backend.memory.cache.zero_()
    backend.generate(mailbox)
    (last,) = mailbox.read(2, 0)
    assert (last.finish, last.held) == ("cancel", 0)
    assert backend.passes == [[0, 1, 3]] and not backend.memory.cache[2].any()
    assert said(mailbox, 3) == alone[3][0]
    backend.close()


def test_an_error_of_one_is_not_the_others(alone):
    """Of a request's own mask, and of a pass: whoever was to share it takes another."""

    def fails(output):
        raise ValueError("no mask")

    backend = opened()
    mailbox = served(backend, asked(0), asked(1, mask=fails), asked(2))
    assert backend.passes == [[0, 1, 2]]
    (failure,) = mailbox.read(1, 0)
    assert isinstance(failure, Failure) and "no mask" in str(failure.error)
    assert [said(mailbox, slot) for slot in (0, 2)] == [alone[slot][0] for slot in (0, 2)]
    right, failed = backend.short.queue, []

    def queue(prompts):
        if not failed:
            failed.append(prompts)
            raise RuntimeError("no memory")
        right(prompts)

    backend.short.queue, backend.passes[:] = queue, []
    mailbox = served(backend, asked(0), asked(3), asked(2))
    (failure,) = mailbox.read(0, 0)
    assert isinstance(failure, Failure) and backend.passes == [[3, 2]]
    assert [said(mailbox, slot) for slot in (3, 2)] == [alone[slot][0] for slot in (3, 2)]
    mailbox = served(backend, replace(asked(1), prompt=(1, 64)))
    (failure,) = mailbox.read(1, 0)
    assert "token id 64 is outside the vocabulary" in str(failure.error)
    backend.close()


def test_a_pass_that_fails_midway_is_waited_for_by_the_next(monkeypatch):
    """What was queued of it still runs, and reads where the next pass's words may be laid."""
    backend, marks = opened(), []

    def marked(device):
        marks.append([False])
        return lambda: marks[-1][0]

    monkeypatch.setattr(short_prompts, "reached", marked)
    short, prompts = backend.short, [backend.short.begin(asked(1)).prompt]
    (one,) = short._passes
    right, laid = one.write, []

    def write(prompts, number, stream):
        laid.append(stream)
        return right(prompts, number, stream)

    def fails(stream):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(one, "write", write)
        patched.setattr(one, "launches", lambda kernel: [lambda stream: None, fails])
        with pytest.raises(RuntimeError, match="no memory"):
            short.queue(prompts)
        assert len(marks) == 1 and not short.last_ended()
        with pytest.raises(RuntimeError, match="no memory"):
            short.queue(prompts)
    assert laid == [0, None]  # the second one's words go by an upload, in the stream's order
    backend.close()


def test_which_prompts_take_a_pass_is_a_function_of_their_length(alone):
    backend = opened()
    for prompt, cached, takes in (
        ((1,) * MOST_TOKENS, 0, True),
        ((1,) * (MOST_TOKENS + 1), 0, False),
        ((1,) * 20, 8, False),
    ):
        assert backend.short.takes(replace(asked(0, cached=cached), prompt=prompt)) is takes
    assert backend.library._sizes == [512]
    mailbox = served(backend, asked(2))
    mailbox = served(backend, asked(2, cached=9))  # its first tokens are there
    assert backend.passes == [[2]] and len(said(mailbox, 2)) == 3
    backend.close()


def test_its_workspace_is_in_the_plan_and_in_what_is_held(monkeypatch):
    plans = []
    monkeypatch.setattr(cuda_backend, "check_memory", lambda plan, *others: plans.append(plan))
    with_pass, without = opened(), opened(FiberBackend)
    lowering = with_pass.layout.lowering
    planned = workspace_bytes(lowering, 4, with_pass._most_blocks)
    tables = sum(t.nbytes for t in with_pass.short._passes[0]._tables.values())
    assert with_pass.short.memory_bytes() == planned + tables
    assert plans[0].weights - plans[1].weights == planned
    own = with_pass.memory_bytes()["other"] - with_pass.library.memory_bytes()
    assert own - (planned + tables) == without.memory_bytes()["other"] - without.library.memory_bytes()
    for backend in (with_pass, without):
        backend.close()


def test_narrow_weights_lanes_and_small_fragments_have_no_pass():
    gpu, wide = find_gpu("h200"), named_shape("qwen3-8b")
    for spec, ranks, want in (
        (wide, 1, True),
        (wide, 2, True),
        (wide, 4, False),  # a matrix in fragments of four rows
        (with_format(wide, FORMATS["fp8-block"]), 1, False),
        (named_shape("laneformer-2b"), 1, False),
        (named_shape("laneformer-2b"), 8, False),
    ):
        assert can_pass(lower(build(spec, ranks), gpu)) is want
