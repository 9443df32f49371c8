"""What host and backend say to each other while a backend serves requests.

    host     post(request) ...... cancel(slot) ... yield_now() ... resume() ... close()
    backend  take() -> requests      push(slot, step) for every token      cancelled(slot), yielding
                                     push_prompt(slot, logprobs) before, if the request asks

The host posts requests and reads steps; the backend takes requests and pushes steps. Either side may
run in its own thread: every operation below is one of Python's atomic ones, so that nobody waits for a
lock. What a GPU's kernel writes is brought here by the backend (serving.py).
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from kog_triton.backends.pace import first_words, get_awake
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


class Step(NamedTuple):
    """One token as it was made; -1 in a last step that brings none.

    `rank` is the token's own, 1 for the likeliest; with `logprob`, None without.

    `finish` is set on the last step only: "stop", "length" or "cancel". `held` then says how many leading
    tokens of prompt and answer have keys and values in the slot.
    """

    token: int
    finish: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    device_ns: int = 0  # when it was made, by the GPU's clock or the token loop's; 0: unknown
    held: int = 0
    rank: int | None = None


class PromptLogprob(NamedTuple):
    """What the model thought of one token of the prompt, given those before it; as in a Step."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class Failure:
    """A request that ended in an error; the backend goes on with the others."""

    error: Exception


class Inbox:
    """What a backend says of one request, and whether the request is to end at the next token boundary."""

    def __init__(self) -> None:
        self.cancelled = False
        # A queue in C: who waits in it holds neither a lock nor the interpreter. None wakes the reader.
        self._steps: SimpleQueue[Step | Failure | None] = SimpleQueue()
        self._prompt: deque[PromptLogprob] = deque()
        self._begun = False  # something was read

    def push(self, step: Step | Failure) -> None:
        self._steps.put(step)

    def push_prompt(self, logprobs: Sequence[PromptLogprob]) -> None:
        self._prompt.extend(logprobs)

    def read(self, timeout: float | None = None) -> list[Step | Failure]:
        """Every step not read before; waits up to `timeout` seconds (None: as long as it takes) for one.

        Empty also when the reader was woken for another reason.
        """
        found: list[Step | Failure] = []
        if timeout != 0 and (step := self._wait(timeout)) is not None:
            found.append(step)
        steps = self._steps
        while not steps.empty():  # asked first: an exception a token would cost a microsecond
            if (step := steps.get_nowait()) is not None:
                found.append(step)
        return found

    def _wait(self, timeout: float | None) -> Step | Failure | None:
        """The first one; None if the reader was woken for another reason, or the time is over."""
        if not self._begun:
            first_words.add(self)
        try:
            step = get_awake(self._steps, timeout)
        except Empty:
            return None
        finally:
            first_words.discard(self)
        self._begun = True
        return step

    @property
    def has_prompt(self) -> bool:
        """Whether `read_prompt` would bring any."""
        return bool(self._prompt)

    def read_prompt(self) -> list[PromptLogprob]:
        """What `push_prompt` brought that was not read before."""
        return [self._prompt.popleft() for _ in range(len(self._prompt))]


@dataclass
class Mailbox:
    """One request a slot may be in flight."""

    _posted: deque[Request] = field(default_factory=deque)
    _inboxes: dict[int, Inbox] = field(default_factory=dict)
    yielding: bool = False
    closed: bool = False
    beats: int = 0
    resumed: dict[int, Any] = field(default_factory=dict)  # slot -> what a backend left on yield

    # ---- host side ----

    def post(self, request: Request, inbox: Inbox | None = None) -> None:
        """Give a request to the backend; what it says goes to `inbox`, or is for `read` by the slot."""
        self._inboxes[request.slot] = inbox or Inbox()
        self._posted.append(request)

    def cancel(self, slot: int) -> None:
        """Ask that the slot's request end at the next token boundary; its last step says "cancel"."""
        self._inboxes[slot].cancelled = True

    def yield_now(self) -> None:
        """Ask `generate` to return at the next token boundary, every request resumable."""
        self.yielding = True

    def resume(self) -> None:
        """Take back `yield_now`: the next `generate` goes on where the last one returned."""
        self.yielding = False

    def close(self) -> None:
        self.closed = True

    def read(self, slot: int, timeout: float | None = None) -> list[Step | Failure]:
        return self._inboxes[slot].read(timeout)

    def read_prompt(self, slot: int) -> list[PromptLogprob]:
        return self._inboxes[slot].read_prompt()

    # ---- backend side ----

    def beat(self) -> None:
        """The backend was seen to go on: a step, or a piece of a prompt."""
        self.beats += 1

    @property
    def stops(self) -> bool:
        """Whether the backend is to return."""
        return self.closed or self.yielding

    def waiting(self) -> bool:
        """Whether a request was posted that nobody took."""
        return bool(self._posted)

    def take(self) -> list[Request]:
        """Requests posted since the last call, in order."""
        return [self._posted.popleft() for _ in range(len(self._posted))]

    def push(self, slot: int, step: Step | Failure) -> None:
        self._inboxes[slot].push(step)

    def push_prompt(self, slot: int, logprobs: Sequence[PromptLogprob]) -> None:
        """Prompt tokens in order, from the second on; all of them before the first step."""
        self._inboxes[slot].push_prompt(logprobs)

    def cancelled(self, slot: int) -> bool:
        return self._inboxes[slot].cancelled
