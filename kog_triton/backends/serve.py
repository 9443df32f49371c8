"""The serving loop of a backend whose token loop runs on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kog_triton.backends.mailbox import Failure, Mailbox, Request, Step, now_ns
from kog_triton.sampling import History, sample


class Forward(Protocol):
    def forward(
        self, slot: int, token_ids: Sequence[int], start: int, last_only: bool
    ) -> np.ndarray: ...


@dataclass
class _Running:
    request: Request
    history: History
    position: int  # tokens of this sequence whose keys and values are in the slot
    pending: list[int]  # tokens still to be run
    made: int = 0


def serve(backend: Forward, mailbox: Mailbox, chunk: int) -> None:
    """Serve until the mailbox is idle, closed or yields: a prompt chunk or a token a slot in turn."""
    running: dict[int, _Running] = mailbox.resumed
    while not (mailbox.closed or mailbox.yielding):
        for r in mailbox.take():
            history = History(r.prompt)
            running[r.slot] = _Running(r, history, r.cached, list(r.prompt[r.cached :]))
        if not running:
            return
        for slot, state in list(running.items()):
            try:
                done = _advance(backend, mailbox, state, chunk)
            except Exception as error:
                mailbox.push(slot, Failure(error))
                done = True
            if done:
                del running[slot]


def _advance(backend: Forward, mailbox: Mailbox, state: _Running, chunk: int) -> bool:
    """One pass for one slot; True when its request has ended."""
    r = state.request
    if mailbox.cancelled(r.slot):
        mailbox.push(r.slot, Step(-1, "cancel", device_ns=now_ns()))
        return True
    tokens, state.pending = state.pending[:chunk], state.pending[chunk:]
    logits = backend.forward(r.slot, tokens, state.position, last_only=True)[-1]
    state.position += len(tokens)
    mailbox.prefilled[r.slot] = state.position
    if state.pending:
        return False
    mask = r.mask(state.history.output) if r.mask else None
    drawn = sample(logits, r.params, state.history, state.position, r.sample_idx, mask)
    state.made += 1
    finish = None
    if drawn.token in r.stop_token_ids:
        finish = "stop"
    elif state.made == r.max_tokens:
        finish = "length"
    mailbox.push(r.slot, Step(drawn.token, finish, drawn.logprob, tuple(drawn.top), now_ns()))
    state.history.append(drawn.token)
    state.pending = [drawn.token]
    return finish is not None
