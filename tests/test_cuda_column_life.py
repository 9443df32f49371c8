"""The life of requests in token columns of the CUDA kernel, its own C++ on a CPU (cuda_walk.py).

They come, wait, are cancelled and end beside each other, go from the kernel of columns to that of one token and
back, and each leaves the bits that it leaves alone.
"""

import re
import threading

import pytest
import torch
from column_cases import COUNT, PROMPTS, alone, make, request, run
from cuda_walk import ColumnBackend, FiberBackend
from kog_triton.backends.cuda import serving
from ring_walker import f16_spec
from test_cuda_life import Server, ended, held, tokens_of

from kog_triton.errors import DeviceError, RunError


@pytest.fixture(scope="module")
def spec():
    return f16_spec()


@pytest.fixture
def backend(spec):
    return make(ColumnBackend, spec, 3, counts=(2, 4))


@pytest.fixture(scope="module")
def apart(spec):
    """What each prompt gives alone: steps, and keys and values."""
    requests = [request(i, prompt, 8) for i, prompt in enumerate(PROMPTS)]
    steps, cache = alone(spec, requests)
    return {p: ([s[0] for s in steps[i]], cache[i]) for i, p in enumerate(PROMPTS)}


def launches(backend):
    """Of the kernel of one token and of those of columns."""
    return backend.kernel.launches, {
        k.layout.columns: k.kernel.launches for k in backend.columns.kernels
    }


def assert_alone(backend, steps, slot, prompt, apart, count=COUNT):
    tokens, cache = apart[prompt]
    assert tokens_of(steps)[:count] == tokens[:count]
    positions = len(prompt) + min(len(steps), 8) - 1
    assert torch.equal(held(backend, slot, positions), cache[..., :positions, :])


def test_requests_run_together_until_one_is_left(backend, apart):
    """Three, then two, then one: every launch has a kernel that fits, and all make a token a step."""
    mailbox = backend.new_mailbox()
    for slot, count in enumerate((3, 5, 8)):
        mailbox.post(request(slot, PROMPTS[slot], count))
    backend.generate(mailbox)
    steps = [mailbox.read(slot) for slot in range(3)]
    for slot, count in enumerate((3, 5, 8)):
        assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, count)
        assert steps[slot][-1].finish == "length" and len(steps[slot]) == count
    assert launches(backend) == (1, {4: 1, 2: 1})
    assert mailbox.prefilled == {
        slot: len(PROMPTS[slot]) + c - 1 for slot, c in enumerate((3, 5, 8))
    }


def test_a_request_joins_one_that_runs(backend, apart):
    server = Server(backend, request(1, PROMPTS[0], 40))
    server.read(1, 3)
    server.post(request(0, PROMPTS[1]))
    steps = server.finish()
    assert_alone(backend, steps[0], 0, PROMPTS[1], apart)
    assert_alone(backend, steps[1], 1, PROMPTS[0], apart, 8)
    assert len(steps[1]) == 40 and launches(backend) == (2, {2: 1})


class LateBackend(FiberBackend):
    """A backend whose compiler waits for a word."""

    column_counts = (4,)

    def __init__(self, *arguments, compiled):
        self._compiled = compiled
        super().__init__(*arguments)

    def _compile(self, source, layout):
        assert source == "decode.cu" or self._compiled.wait(60)
        super()._compile(source, layout)


def test_requests_take_turns_while_their_kernel_is_compiled(spec, apart):
    compiled = threading.Event()
    backend = make(LateBackend, spec, compiled=compiled)
    server = Server(backend, *(request(slot, PROMPTS[slot], 40) for slot in range(3)))
    server.read(0, 3)
    assert not backend.columns.kernels  # three tokens came in turn
    compiled.set()
    steps = server.finish()
    for slot in range(3):
        assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, 8)
    assert backend.kernel.launches >= 1 and launches(backend)[1][4] >= 1


class FailingBackend(FiberBackend):
    """A backend whose compiler refuses kernels of columns."""

    column_counts = (4,)

    def _compile(self, source, layout):
        if source != "decode.cu":
            raise DeviceError("the compiler is out of room")
        super()._compile(source, layout)


def test_requests_take_turns_where_the_compiler_fails(spec, apart, caplog):
    backend = make(FailingBackend, spec)
    for _ in range(2):  # the second time it has failed before
        server = Server(backend, *(request(slot, PROMPTS[slot], 12) for slot in range(3)))
        steps = server.finish()
        for slot in range(3):
            assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, 8)
    assert not backend.columns.kernels
    assert "no kernel of 4 columns, requests take turns: the compiler is out" in caplog.text


def interrupt(backend, monkeypatch, word, *requests):
    """Steps of requests, of which the third token of slot 0 says a word to the mailbox; launches of 4 steps."""
    monkeypatch.setattr(serving, "_most_steps", lambda live, slots: 4)
    server = Server(backend)
    server.thread.join()
    push, mailbox, pushed = server.mailbox.push, server.mailbox, []

    def say(slot, step):
        push(slot, step)
        pushed.append(slot)
        if slot == 0 and pushed.count(0) == 3:
            word(mailbox)

    monkeypatch.setattr(mailbox, "push", say)
    server.post(*requests)
    server.start()
    return server


def test_a_cancel_ends_one_of_them(backend, apart, monkeypatch):
    requests = [request(slot, PROMPTS[slot], 12) for slot in range(3)]
    server = interrupt(backend, monkeypatch, lambda mailbox: mailbox.cancel(0), *requests)
    steps = server.finish()
    assert steps[0][-1].finish == "cancel" and len(steps[0]) < 12
    for slot in (1, 2):
        assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, 8)
        assert len(steps[slot]) == 12


def test_a_yield_returns_at_a_step_and_all_resume(backend, apart, monkeypatch):
    requests = [request(slot, PROMPTS[slot], 12) for slot in range(3)]
    server = interrupt(backend, monkeypatch, lambda mailbox: mailbox.yield_now(), *requests)
    assert not any(ended(steps) for steps in server.finish().values())
    backend.forward_logits([1, 2, 3])  # leaves all slots alone
    server.mailbox.resume()
    server.start()
    steps = server.finish()
    for slot in range(3):
        assert_alone(backend, steps[slot], slot, PROMPTS[slot], apart, 8)
        assert len(steps[slot]) == 12


def test_requests_that_end_in_the_same_step_all_end(backend, apart):
    stop = apart[PROMPTS[0]][0][4]
    got = run(
        backend,
        request(0, PROMPTS[0], 8, stop_token_ids=frozenset({stop})),
        request(1, PROMPTS[3], 5),
    )
    assert [got[0][-1][1], got[1][-1][1]] == ["stop", "length"]
    assert launches(backend) == (0, {2: 1})


def test_a_nan_is_an_error_of_its_request_alone(backend, apart):
    backend.memory.embed[99, 3] = torch.nan
    mailbox = backend.new_mailbox()
    for slot, prompt in enumerate([PROMPTS[0], (7, 99), PROMPTS[1]]):
        mailbox.post(request(slot, prompt))
    backend.generate(mailbox)
    for slot, prompt in ((0, PROMPTS[0]), (2, PROMPTS[1])):
        assert tokens_of(mailbox.read(slot)) == apart[prompt][0][:COUNT]
    (failure,) = mailbox.read(1)
    assert "NaN or +inf after 0 tokens" in str(failure.error)


def test_more_requests_than_columns_all_progress(spec, apart, monkeypatch):
    monkeypatch.setattr(serving, "MOST_SILENT", 4)
    backend = make(ColumnBackend, spec, 5, counts=(2,))
    got = run(backend, *(request(i, PROMPTS[i], 8) for i in range(5)))
    for i in range(5):
        assert [s[0] for s in got[i]] == apart[PROMPTS[i]][0]
    assert set(launches(backend)[1]) == {2}


def test_a_long_prompt_beside_an_answer(spec):
    """A column without logits beside one that has them, and steps in which none has."""
    requests = [request(0, range(3, 43), 3), request(1, range(9, 21), 30)]
    steps, cache = alone(spec, requests)
    backend = make(ColumnBackend, spec, 2, counts=(2,), seed=5)
    assert run(backend, *requests) == steps
    assert torch.equal(backend.memory.cache, cache)


def test_an_expired_wait_names_its_place_and_the_next_requests_run(backend, apart):
    requests = [request(slot, PROMPTS[slot]) for slot in range(2)]
    run(backend, *requests)  # loads the kernel
    (kernel,) = (k.kernel for k in backend.columns.kernels)
    backend.wait_ticks, kernel.absent = 2000, 1
    mailbox = backend.new_mailbox()
    for r in requests:
        mailbox.post(r)
    backend.generate(mailbox)
    for slot in range(2):
        (failure,) = mailbox.read(slot)
        assert isinstance(failure.error, RunError)
        assert re.search(
            r"expired: rank 0, block 0, layer 0, (attention_qkv, word \d+ of qkv|"
            r"o_proj_input, word \d+ of tops), seen 0, wanted 1",
            str(failure.error),
        )
    backend.wait_ticks, kernel.absent = 1 << 20, -1
    got = run(backend, *requests)
    assert [s[0] for s in got[1]] == apart[PROMPTS[1]][0][:COUNT]
