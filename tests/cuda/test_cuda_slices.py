"""Requests get tokens while a library runs a long prompt beside them, and a cancelled one keeps what it had filled."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kog_triton.backends import BackendOptions, watchdog
from kog_triton.backends.mailbox import Mailbox, Request, Step
from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError
from kog_triton.model.spec import DType
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_walk import FiberBackend
from tests.lib.prefill_cases import tokens_of
from tests.lib.ring_walker import spec_of

GREEDY = SamplingParams(temperature=0)
SPEC = spec_of(num_layers=3, dtype=DType.F16)
SHORT, LONG = (5, 6), tuple(tokens_of(41))
EVEN = np.arange(SPEC.vocab_size) % 2 == 0


def opened():
    backend = FiberBackend(RandomWeights(SPEC), BackendOptions(num_slots=3, prefill="library"))
    backend.library.chunk, backend.library._sizes = 7, [4]
    return backend


def request(slot, prompt, count, cached=0):
    return Request(slot, prompt, GREEDY, 0, count, frozenset(), cached=cached)


def said(mailbox, slot):
    return [s.token for s in mailbox.read(slot, 0) if isinstance(s, Step) and s.token >= 0]


def alone(prompt, count):
    backend, mailbox = opened(), Mailbox()
    mailbox.post(request(0, prompt, count))
    backend.generate(mailbox)
    return said(mailbox, 0)


def test_a_request_gets_tokens_between_the_slices_of_a_long_prompt(monkeypatch):
    """A launch between any two slices on the GPU's stream, though each slice is queued while the launch before runs."""
    backend, mailbox, queued, told_at = opened(), Mailbox(), [], []
    right, launch = PromptRun.advance, backend._launch

    def advance(self, seconds, at_once=False):
        queued.append("slice")
        return right(self, 0.0, at_once)

    def launched(*arguments, **others):
        queued.append("launch")
        return launch(*arguments, **others)

    def push(slot, step):
        told_at.append((slot, len(queued), queued[-1]))
        Mailbox.push(mailbox, slot, step)

    monkeypatch.setattr(PromptRun, "advance", advance)
    monkeypatch.setattr(backend, "_launch", launched)
    monkeypatch.setattr(mailbox, "push", push)
    mailbox.post(request(0, SHORT, 40))
    mailbox.post(request(1, LONG, 3))
    backend.generate(mailbox)
    assert said(mailbox, 0) == alone(SHORT, 40)
    assert said(mailbox, 1) == alone(LONG, 3)
    short = [(at, last) for slot, at, last in told_at if slot == 0]
    assert short[-1][0] < min(at for slot, at, _ in told_at if slot == 1)
    beside = queued[short[0][0] : short[-1][0]]
    assert beside.count("slice") > 30
    assert ("slice", "slice") not in pairwise(beside)
    assert [last for _, last in short].count("slice") > 30


def test_masks_come_while_slices_are_queued_behind_the_launch_that_waits_for_them(monkeypatch):
    right, slices = PromptRun.advance, []

    def advance(self, seconds, at_once=False):
        slices.append(at_once)
        return right(self, 0.0, at_once)

    def even(output):
        asked.append(len(slices))
        return EVEN

    backend, mailbox, asked = opened(), Mailbox(), []
    masked = replace(request(0, SHORT, 20), mask=even)
    mailbox.post(masked)
    backend.generate(mailbox)
    want = said(mailbox, 0)
    assert len(want) == 20 and not any(token % 2 for token in want) and want != alone(SHORT, 20)
    asked.clear()
    monkeypatch.setattr(PromptRun, "advance", advance)
    mailbox.post(masked)
    mailbox.post(request(1, LONG, 3))
    backend.generate(mailbox)
    assert said(mailbox, 0) == want and said(mailbox, 1) == alone(LONG, 3)
    assert len(set(asked)) > 15  # slices between most of them


def test_short_prompts_that_come_together_run_before_the_first_launch(monkeypatch):
    """And before the rest of a long one that came first."""
    backend, mailbox = opened(), Mailbox()
    right, prompts = PromptRun.advance, []

    def advance(self, seconds, at_once=False):
        if not prompts:  # it comes while the first one runs
            mailbox.post(request(2, SHORT[::-1], 4))
        prompts.append((self.short, at_once, backend.kernel.launches))
        return right(self, 0.0, at_once) if not self.short else right(self, seconds, at_once)

    monkeypatch.setattr(PromptRun, "advance", advance)
    mailbox.post(request(1, LONG, 3))
    mailbox.post(request(0, SHORT, 4))
    backend.generate(mailbox)
    monkeypatch.undo()
    assert [p for p in prompts if p[0]] == [(True, True, 0), (True, True, 0)]
    assert [short for short, *_ in prompts[:3]] == [True, True, False]
    assert said(mailbox, 0) == alone(SHORT, 4) and said(mailbox, 1) == alone(LONG, 3)
    assert said(mailbox, 2) == alone(SHORT[::-1], 4)


def test_a_cancelled_prompt_keeps_what_it_had_filled(monkeypatch):
    backend, mailbox = opened(), Mailbox()
    right = PromptRun.advance

    def advance(self, seconds, at_once=False):
        ended = right(self, 0.0, at_once)
        if self.filled == 21:
            mailbox.cancel(1)
        return ended

    monkeypatch.setattr(PromptRun, "advance", advance)
    mailbox.post(request(0, SHORT, 60))
    mailbox.post(request(1, LONG, 3))
    backend.generate(mailbox)
    (last,) = mailbox.read(1, 0)
    assert (last.finish, last.held) == ("cancel", 21)
    monkeypatch.undo()
    mailbox = Mailbox()
    mailbox.post(request(1, LONG, 3, cached=21))
    backend.generate(mailbox)
    assert said(mailbox, 1) == alone(LONG, 3)


def test_a_slice_that_never_ends_shuts_the_backend(monkeypatch):
    """As a silent kernel does: it is no error of one request, behind which others would wait for ever."""
    monkeypatch.setattr(watchdog, "_kept", [])
    backend, mailbox = opened(), Mailbox()
    mailbox.post(request(0, SHORT, 3))
    mailbox.post(request(1, LONG, 3))
    with monkeypatch.context() as patched:
        patched.setattr(watchdog, "SILENCE_S", 0.05)
        patched.setattr(PromptRun, "_reached", lambda self, mark: False)
        with pytest.raises(watchdog.Stalled):
            backend.generate(mailbox)
    with pytest.raises(DeviceError, match="the GPU fell silent in an earlier request"):
        backend.generate(Mailbox())
    backend.close()
    assert backend.memory is not None  # kept, for what may still be written
