"""The loop that serves launches, by a launcher whose kernel makes a token of each request at every wait of the host."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kog_triton.backends import serving
from kog_triton.backends.launch_queue import LaunchQueue
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.serving import Launch, LaunchServing, Result, SlotWords
from kog_triton.backends.token_words import OUTCOME_SHIFT, Outcome
from kog_triton.sampling.params import SamplingParams


class Kernel:
    """serving.Launcher. `together`: a launch ends with the first of its requests that ends, else with the last."""

    spec = SimpleNamespace(vocab_size=32)
    device, stamps = torch.device("cpu"), False

    def __init__(self, together):
        self._together, self._words, self._made, self._ended, self._beats = together, {}, {}, [], 0

    def prompt(self, request):
        return None

    def admit(self, request, position):
        count = request.max_tokens + 1
        tokens, stamps = np.zeros(count, np.int64), np.zeros(count, np.int64)
        none, mask = np.zeros((count, 0), np.uint64), np.zeros(1, np.uint64)
        self._words[request.slot], self._made[request.slot] = (SlotWords(tokens, stamps, none, mask), 0)

    def words(self, slot):
        return self._words[slot]

    def steps(self):
        return self._beats

    def leave(self):
        self._running = {}

    def launch(self, running, most=None):
        self._running, self._ended = dict(running), []
        settle = lambda: Result([0] * 2, self._ended)  # noqa: E731
        return Launch(list(running), lambda: not self._running, settle, together=self._together)

    def step(self):
        """A token of each request that runs."""
        self._beats += 1
        for slot, one in list(self._running.items()):
            self._made[slot] += 1
            last = self._made[slot] == one.request.max_tokens
            outcome = Outcome.LENGTH if last else Outcome.RUNNING
            number = self._made[slot]
            self._words[slot].tokens[number - 1] = outcome << OUTCOME_SHIFT + 32 | number << 32 | 7
            if last:
                self._ended.append(slot)
                self._running = {} if self._together else self._running
                self._running.pop(slot, None)


@pytest.mark.parametrize(
    ("together", "said"),
    [(True, [False, False]), (False, [False, False, False, False])],
    ids=["with the first", "with the last"],
)
def test_a_launch_is_expected_to_end_when_it_may(together, said, monkeypatch):
    """`ends`, for which the host polls often, of every wait in the first launch of requests of two and four tokens."""
    kernel, heard = Kernel(together), []

    def wait(self, ends, glance):
        heard.append(ends)
        kernel.step()

    monkeypatch.setattr(serving.Pace, "wait", wait)
    mailbox = Mailbox()
    for slot, count in ((0, 2), (1, 4)):
        params = SamplingParams(temperature=0)
        mailbox.post(Request(slot, (1, 2), params, 0, count))
    LaunchServing(kernel, mailbox, LaunchQueue()).run()
    assert heard[: len(said)] == said
    assert [len(mailbox.read(slot, 0)) for slot in (0, 1)] == [2, 4]


def test_the_lock_is_let_go_of_before_the_driver_is_asked(monkeypatch):
    """Once for each look that told tokens; only a look that told none is waited behind."""
    kernel, did, mailbox = Kernel(True), [], Mailbox()
    launch = kernel.launch

    def watched(running, most=None):
        begun = launch(running, most)
        return replace(begun, ended=lambda: did.append("asks") or begun.ended())

    def wait(self, ends, glance):
        did.append("waits")
        kernel.step()

    kernel.launch = watched
    monkeypatch.setattr(serving.Pace, "told", lambda self, tokens: did.append(f"told {tokens}"))
    monkeypatch.setattr(serving.Pace, "wait", wait)
    mailbox.post(Request(0, (1, 2), SamplingParams(temperature=0), 0, 2))
    LaunchServing(kernel, mailbox, LaunchQueue()).run()
    assert did == ["asks", "waits", "told 1", "asks", "asks", "waits", "told 1", "asks"]


class Alternating(Kernel):
    """The host sees a token of one request, then one of another."""

    def step(self):
        rest = dict(self._running)
        slot = min(rest, key=self._made.__getitem__)
        self._running = {slot: rest.pop(slot)}
        super().step()
        self._running = rest | self._running


def test_a_launch_has_as_many_steps_as_one_of_its_requests_has_tokens(monkeypatch):
    kernel, told, mailbox = Alternating(False), [], Mailbox()
    monkeypatch.setattr(serving.Pace, "wait", lambda *_: kernel.step())
    monkeypatch.setattr(serving.Share, "told", lambda self, seconds, tokens, beside: told.append(tokens))
    for slot in (0, 1):
        mailbox.post(Request(slot, (1, 2), SamplingParams(temperature=0), 0, 4))
    LaunchServing(kernel, mailbox, LaunchQueue()).run()
    assert told == [4] and [len(mailbox.read(slot, 0)) for slot in (0, 1)] == [4, 4]


def test_a_cancel_is_heard_before_the_token_behind_the_next_mask(monkeypatch):
    """However soon the kernel makes a token of the mask that it waited for."""
    kernel, mailbox = Kernel(True), Mailbox()
    bring = LaunchServing._bring_next_mask

    def answered_at_once(self, one):
        bring(self, one)
        kernel.step()

    def give_up(output):
        if len(output) == 2:
            mailbox.cancel(0)

    monkeypatch.setattr(LaunchServing, "_bring_next_mask", answered_at_once)
    monkeypatch.setattr(serving.Pace, "wait", lambda *_: kernel.step())
    mailbox.post(Request(0, (1, 2), SamplingParams(temperature=0), 0, 20, mask=give_up))
    LaunchServing(kernel, mailbox, LaunchQueue()).run()
    *tokens, last = mailbox.read(0, 0)
    assert (len(tokens), last.finish) == (2, "cancel")


def test_a_cancel_by_a_mask_s_function_is_told_before_the_mask(monkeypatch):
    """A kernel that goes on the moment it has a mask looks at the host's word before the next one, not after it."""
    kernel, mailbox, left = Kernel(True), Mailbox(), []
    kernel._running = {}

    class Mask(np.ndarray):
        def __setitem__(self, where, words):
            super().__setitem__(where, words)
            left.append(not kernel._running)

    def give_up(output):
        if len(output) == 2:
            mailbox.cancel(0)

    monkeypatch.setattr(serving.Pace, "wait", lambda *_: kernel.step())
    admit, launch = kernel.admit, kernel.launch

    def admit_watched(request, position):
        admit(request, position)
        words = kernel._words[0]
        kernel._words[0] = words._replace(mask=words.mask.view(Mask))

    def launch_watched(running, most=None):
        left.clear()
        return launch(running, most)

    kernel.admit, kernel.launch = admit_watched, launch_watched
    mailbox.post(Request(0, (1, 2), SamplingParams(temperature=0), 0, 20, mask=give_up))
    LaunchServing(kernel, mailbox, LaunchQueue()).run()
    assert mailbox.read(0, 0)[-1].finish == "cancel"
    assert left == [False, True]  # behind token 1, and behind token 2, whose function gave up
