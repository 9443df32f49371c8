"""What a request of the HIP kernel meets while its machine code runs in the executor, behind a libamdhip64 of our own
(tests/lib/fake_hip.py): masks of the host, a kernel that is told to leave, a request that is cancelled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.hip.backend import HipBackend
from kog_triton.backends.mailbox import Mailbox, Step
from tests.lib.fake_hip import FakeHip
from tests.lib.gfx942.executor import Memory
from tests.lib.gfx942.requests import ASKED, TOGETHER, TOKENS, expected, tokens_of
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.hip_machine import install
from tests.lib.lowering_cases import ArrayWeights

CASE = "llama"
LONG_ENOUGH = 40  # tokens of a request that is cancelled: the host is slower than the executor


@contextmanager
def opened(memory: Memory, seed: int, slots: int = 1) -> Iterator[HipBackend]:
    """All by the kernel of one token (`install`): requests take turns, prompts go a token at a time."""
    case = CASES[CASE]
    with pytest.MonkeyPatch.context() as patched:
        install(FakeHip(seed, memory=memory), patched, case.num_blocks)
        backend = HipBackend(ArrayWeights(case.spec), BackendOptions(slots, max_context=64))
        try:
            yield backend
        finally:
            backend.close()


def masked_well(memory: Memory, seed: int) -> bool:
    mailbox = Mailbox()
    mailbox.post(ASKED["masks"].request())
    with opened(memory, seed) as backend:
        backend.generate(mailbox)
    return tokens_of(mailbox.read(0, 0)) == expected(CASE, "masks")


def yielded_well(memory: Memory, seed: int) -> bool:
    """Whether two requests make what each makes alone, in a kernel that is told to leave as soon as something comes."""
    mailbox, launches = Mailbox(), 0
    made: dict[int, list[Any]] = {slot: [] for slot in range(len(TOGETHER))}
    for slot, name in enumerate(TOGETHER):
        mailbox.post(ASKED[name].request(slot))
    push = mailbox.push

    def leave(slot: int, step: Any) -> None:
        push(slot, step)
        mailbox.yield_now()

    mailbox.push = leave  # type: ignore[method-assign]
    with opened(memory, seed, len(TOGETHER)) as backend:
        while not launches or mailbox.resumed:
            mailbox.resume()
            backend.generate(mailbox)
            launches += 1
    for slot, steps in made.items():
        steps += mailbox.read(slot, 0)
    return launches > 1 and all(
        tokens_of(made[slot]) == expected(CASE, name) for slot, name in enumerate(TOGETHER)
    )


def cancelled_well(memory: Memory, seed: int) -> bool:
    """Whether a request that is cancelled behind its second token ends so, with the tokens that it would have had."""
    mailbox, came = Mailbox(), 0
    mailbox.post(ASKED["greedy"].request(tokens=LONG_ENOUGH))
    push = mailbox.push

    def cancel(slot: int, step: Any) -> None:
        nonlocal came
        push(slot, step)
        came += 1
        if came == 2:
            mailbox.cancel(slot)

    mailbox.push = cancel  # type: ignore[method-assign]
    with opened(memory, seed) as backend:
        backend.generate(mailbox)
    *steps, last = mailbox.read(0, 0)
    tokens = [step.token for step in steps if isinstance(step, Step)]
    ended = isinstance(last, Step) and last.finish == "cancel"
    return ended and len(tokens) >= 2 and tokens[:TOKENS] == expected(CASE)[: len(tokens)]


LIVES: dict[str, Callable[[Memory, int], bool]] = {
    "masks": masked_well,
    "yields": yielded_well,
    "cancelled after two tokens": cancelled_well,
}
