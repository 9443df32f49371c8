"""What host and backend say to each other while a backend serves requests.

    host     post(request) ...... cancel(slot) ... yield_now() ... resume() ... close()
    backend  take() -> requests      push(slot, step) for every token      cancelled(slot), yielding
                                     push_prompt(slot, logprobs) before, if the request asks

The host posts requests and reads steps; the backend takes requests and pushes steps. Either side may
run in its own thread. This class is the plain one, in host memory, for backends whose loop runs on
the host; a GPU backend keeps the same words in pinned mapped memory and offers the same methods.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kog_triton.sampling.params import SamplingParams

MaskHook = Callable[[Sequence[int]], "np.ndarray | None"]


@dataclass(frozen=True)
class Request:
    """One request as a backend sees it: token ids in, token ids out, in one slot (a KV home)."""

    slot: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int  # at least 1, and prompt + max_tokens fits the slot
    stop_token_ids: frozenset[int] = frozenset()  # end of sequence and the caller's, if not ignored
    cached: int = 0  # leading prompt tokens whose keys and values the slot already holds
    sample_idx: int = 0  # which of `n` samples: part of the random counter
    prompt_logprobs: int | None = None  # how many candidates a prompt token; then cached is 0
    mask: MaskHook | None = None  # output ids so far -> uint32[ceil(vocab / 32)] of allowed ids


@dataclass(frozen=True)
class Step:
    """One token as it was made. `finish` is set on the last one only: "stop", "length" or "cancel"."""

    token: int
    finish: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    device_ns: int = 0  # when it was made, by the GPU's clock or the token loop's; 0: unknown


@dataclass(frozen=True)
class PromptLogprob:
    """What the model thought of one token of the prompt, given those before it; as in a Step."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Failure:
    """A request that ended in an error; the backend goes on with the others."""

    error: Exception


@dataclass
class Mailbox:
    """The host-memory mailbox. `num_slots` requests may be in flight, one a slot."""

    num_slots: int
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _posted: deque[Request] = field(default_factory=deque)
    _steps: dict[int, deque[Step | Failure]] = field(default_factory=dict)
    _prompt: dict[int, list[PromptLogprob]] = field(default_factory=dict)
    _cancelled: set[int] = field(default_factory=set)
    yielding: bool = False
    closed: bool = False
    prefilled: dict[int, int] = field(default_factory=dict)  # slot -> tokens in its KV cache
    resumed: dict[int, Any] = field(default_factory=dict)  # slot -> what a backend left on yield

    # ---- host side ----

    def post(self, request: Request) -> None:
        with self._lock:
            self._cancelled.discard(request.slot)
            self._steps[request.slot] = deque()
            self._prompt[request.slot] = []
            self.prefilled[request.slot] = request.cached
            self._posted.append(request)
            self._lock.notify_all()

    def cancel(self, slot: int) -> None:
        """Ask that the slot's request end at the next token boundary; its last step says "cancel"."""
        with self._lock:
            self._cancelled.add(slot)

    def yield_now(self) -> None:
        """Ask `generate` to return at the next token boundary, every request resumable."""
        self.yielding = True

    def resume(self) -> None:
        """Take back `yield_now`: the next `generate` goes on where the last one returned."""
        self.yielding = False

    def close(self) -> None:
        with self._lock:
            self.closed = True
            self._lock.notify_all()

    def read(self, slot: int, timeout: float | None = None) -> list[Step | Failure]:
        """Every step of the slot not read before; waits up to `timeout` seconds for the first."""
        with self._lock:
            steps = self._steps[slot]
            if not steps:
                self._lock.wait_for(lambda: bool(steps), timeout)
            out = list(steps)
            steps.clear()
            return out

    def read_prompt(self, slot: int) -> list[PromptLogprob]:
        """What `push_prompt` brought that was not read before."""
        with self._lock:
            out, self._prompt[slot] = self._prompt[slot], []
            return out

    # ---- backend side ----

    def take(self) -> list[Request]:
        """Requests posted since the last call, in order."""
        with self._lock:
            out = list(self._posted)
            self._posted.clear()
            return out

    def push(self, slot: int, step: Step | Failure) -> None:
        with self._lock:
            self._steps[slot].append(step)
            self._lock.notify_all()

    def push_prompt(self, slot: int, logprobs: Sequence[PromptLogprob]) -> None:
        """Prompt tokens in order, from the second on; all of them before the first step."""
        with self._lock:
            self._prompt[slot] += logprobs

    def cancelled(self, slot: int) -> bool:
        return slot in self._cancelled
