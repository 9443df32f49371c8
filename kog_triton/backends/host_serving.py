"""Requests on a backend whose token loop runs on the host: a prompt chunk or a token a slot in turn."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from kog_triton.backends.mailbox import Mailbox, Request, Step
from kog_triton.backends.serving import FINISH, Running, Serving, prompt_logprobs
from kog_triton.backends.token_words import Outcome
from kog_triton.sampling import History, sample


class Forward(Protocol):
    def forward(self, slot: int, token_ids: Sequence[int], start: int, last_only: bool) -> np.ndarray: ...


@dataclass
class HostRunning(Running):
    """`position` tokens of this sequence have keys and values in the slot."""

    history: History
    pending: list[int]  # tokens still to be run


class HostServing(Serving[HostRunning]):
    """Prompts run `chunk` tokens at a time."""

    def __init__(self, backend: Forward, mailbox: Mailbox, chunk: int) -> None:
        super().__init__(mailbox)
        self._backend, self._chunk = backend, chunk

    def begin(self, request: Request) -> HostRunning:
        pending = list(request.prompt[request.cached :])
        return HostRunning(request, request.cached, History(request.prompt), pending)

    def advance(self) -> None:
        for one in list(self.running.values()):
            self.attempt(one.request.slot, partial(self._step, one))

    def _step(self, one: HostRunning) -> None:
        """One pass for one slot."""
        r = one.request
        tokens, one.pending = one.pending[: self._chunk], one.pending[self._chunk :]
        every = r.prompt_logprobs is not None
        rows = self._backend.forward(r.slot, tokens, one.position, last_only=not every)
        if every:
            # the last row of the last chunk is that of the first output token
            self.mailbox.push_prompt(r.slot, prompt_logprobs(r, rows, one.position + 1))
        one.position += len(tokens)
        if one.pending:
            return
        mask = r.mask(one.history.output) if r.mask else None
        drawn = sample(rows[-1], r.params, one.history, one.position, r.sample_idx, mask)
        one.history.append(drawn.token)
        one.pending = [drawn.token]
        outcome = Outcome.RUNNING
        if drawn.token in r.stop_token_ids:
            outcome = Outcome.STOP
        elif len(one.history.output) == r.max_tokens:
            outcome = Outcome.LENGTH
        made = time.perf_counter_ns()  # a reader that is late finds several steps at once
        finish = FINISH.get(outcome)
        step = Step(drawn.token, finish, drawn.logprob, tuple(drawn.top), made, rank=drawn.rank)
        self.tell(one, step)
