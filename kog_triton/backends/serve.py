"""The serving loop of a backend whose token loop runs on the host."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kog_triton.backends.mailbox import Failure, Mailbox, PromptLogprob, Request, Step
from kog_triton.errors import RunError
from kog_triton.sampling import History, raw_logprobs, sample


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
        mailbox.push(r.slot, Step(-1, "cancel"))
        return True
    tokens, state.pending = state.pending[:chunk], state.pending[chunk:]
    every = r.prompt_logprobs is not None
    rows = backend.forward(r.slot, tokens, state.position, last_only=not every)
    if every:
        mailbox.push_prompt(r.slot, prompt_logprobs(r, rows, state.position + 1))
    state.position += len(tokens)
    mailbox.prefilled[r.slot] = state.position
    if state.pending:
        return False
    mask = r.mask(state.history.output) if r.mask else None
    drawn = sample(rows[-1], r.params, state.history, state.position, r.sample_idx, mask)
    state.made += 1
    finish = None
    if drawn.token in r.stop_token_ids:
        finish = "stop"
    elif state.made == r.max_tokens:
        finish = "length"
    made = time.perf_counter_ns()  # a reader that is late finds several steps at once
    mailbox.push(r.slot, Step(drawn.token, finish, drawn.logprob, tuple(drawn.top), made))
    state.history.append(drawn.token)
    state.pending = [drawn.token]
    return finish is not None


def prompt_logprobs(r: Request, rows: np.ndarray, first: int) -> list[PromptLogprob]:
    """The prompt's tokens from position `first` on, each by the logits of the position before.

    rows float32 [positions, vocab], from `first - 1` on. RunError if one holds NaN or +inf.
    """
    out = []
    # the last row of the last chunk is that of the first output token
    for position, (row, token) in enumerate(zip(rows, r.prompt[first:], strict=False), first):
        logprob, top = raw_logprobs(row, token, r.prompt_logprobs or 0)
        if math.isnan(logprob):
            raise RunError(f"the logits of position {position} hold NaN or +inf: the run is void")
        out.append(PromptLogprob(token, logprob, top))
    return out
