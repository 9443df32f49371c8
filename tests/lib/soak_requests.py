"""What a soak asks: requests of all lengths and kinds, and further turns behind their answers; and calls of its backend
that are waited for so long and no longer."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kog_triton.backends.mailbox import Request
from kog_triton.sampling import SamplingParams
from tests.lib.soak_record import named

MORE = (5, 70, 350)  # tokens of a further turn behind an answer


def even(vocab: int) -> np.ndarray:
    """A mask that allows every other id."""
    return np.full(-(-vocab // 32), 0x55555555, np.uint32)


@dataclass(frozen=True)
class Asked:
    """A request, and what kind it is. `after`: that one's number whose prompt and answer the slot must hold."""

    request: Request
    kind: str
    after: int = -1

    @property
    def name(self) -> str:
        return named(self.kind, len(self.request.prompt), self.request.cached)


def requests_of(vocab: int, room: int, lengths: tuple[int, ...], counts: tuple[int, ...]) -> list[Asked]:
    """Of all lengths and kinds; each may be asked in any slot."""
    draws, out = np.random.default_rng(0), []
    mask = even(vocab)
    for i, length in enumerate(lengths):
        for j, count in enumerate(counts):
            if length + count > room:
                continue
            kind = ("greedy", "drawn", "masked", "greedy")[(i + j) % 4]
            params = SamplingParams(temperature=0)
            if kind == "drawn":
                params = SamplingParams(temperature=1.0, top_p=0.9, seed=7 * i + j)
            prompt = tuple(draws.integers(0, vocab, length).tolist())
            masked = (lambda output: mask) if kind == "masked" else None
            request = Request(0, prompt, params, params.seed or 0, count, mask=masked)
            out.append(Asked(request, kind))
    return out


def further_requests(asked: list[Asked], expected: list[list[int]], vocab: int, room: int) -> list[Asked]:
    """Behind greedy answers: the conversation so far, of which the slot holds all but the last token, and more."""
    draws, out = np.random.default_rng(1), []
    for i, (one, said) in enumerate(zip(asked, expected, strict=True)):
        before = one.request
        more = MORE[i % len(MORE)]
        held = len(before.prompt) + len(said) - 1
        if one.kind != "greedy" or held + 1 + more + 9 > room:
            continue
        prompt = (*before.prompt, *said, *draws.integers(0, vocab, more).tolist())
        request = replace(before, prompt=prompt, cached=held, max_tokens=9)
        out.append(Asked(request, "further", i))
    return out


class Hung(Exception):
    """A backend did not return: nobody may use it any more."""


def begun(act: Callable[[], Any]) -> Callable[[float], Any]:
    """`act` on a thread of its own. What is returned waits so many seconds for what it returns, or raises: Hung if
    nothing came."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended(seconds: float) -> Any:
        thread.join(seconds)
        if thread.is_alive():
            raise Hung(f"no return within {seconds:g} s")
        if errors:
            raise errors[0]
        return results[0]

    return ended
