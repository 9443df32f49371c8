"""What a request of the HIP kernel meets while its machine code runs in the executor, behind a libamdhip64 of our own
(tests/lib/fake_hip.py): masks of the host, a kernel that is told to leave, a request that is cancelled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.hip import selftest
from kog_triton.backends.hip.backend import HipBackend
from kog_triton.backends.mailbox import Failure, Mailbox, Step
from tests.lib.fake_hip import FakeHip
from tests.lib.gfx942.requests import ASKED, TOGETHER, TOKENS, expected, tokens_of
from tests.lib.gfx942.triton_backend import Conditions
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.hip_machine import install
from tests.lib.lowering_cases import ArrayWeights

CASE = "llama"
LONG_ENOUGH = 40  # tokens of a request that is cancelled: the host is slower than the executor


class Watched(Mailbox):
    """`watch` is called with the slot of each step that a backend pushes, behind that; `pushed` counts them."""

    def __init__(self, watch: Callable[[int], None]) -> None:
        super().__init__()
        self.watch, self.pushed = watch, 0

    def push(self, slot: int, step: Step | Failure) -> None:
        super().push(slot, step)
        self.pushed += 1
        self.watch(slot)


@contextmanager
def opened(c: Conditions, slots: int = 1) -> Iterator[HipBackend]:
    """All by the kernel of one token (`install`): requests take turns, prompts go a token at a time."""
    case = CASES[CASE]
    with pytest.MonkeyPatch.context() as patched:
        install(FakeHip(c.seed, memory=c.memory, xcc=c.xcc), patched, case.num_blocks)
        patched.setattr(selftest, "XCD_CUS", 304)  # one of the maps puts all blocks on one XCD
        backend = HipBackend(ArrayWeights(case.spec), BackendOptions(slots, max_context=64))
        try:
            yield backend
        finally:
            backend.close()


def masked_well(c: Conditions) -> bool:
    mailbox = Mailbox()
    mailbox.post(ASKED["masks"].request())
    with opened(c) as backend:
        backend.generate(mailbox)
    return tokens_of(mailbox.read(0, 0)) == expected(CASE, "masks")


def yielded_well(c: Conditions) -> bool:
    """Whether two requests make what each makes alone, in a kernel that is told to leave as soon as something comes."""
    mailbox, launches = Watched(lambda slot: mailbox.yield_now()), 0
    for slot, name in enumerate(TOGETHER):
        mailbox.post(ASKED[name].request(slot))
    with opened(c, len(TOGETHER)) as backend:
        while not launches or mailbox.resumed:
            mailbox.resume()
            backend.generate(mailbox)
            launches += 1
    made = [tokens_of(mailbox.read(slot, 0)) for slot in range(len(TOGETHER))]
    return launches > 1 and made == [expected(CASE, name) for name in TOGETHER]


def cancelled_well(c: Conditions) -> bool:
    """Whether a request that is cancelled behind its second token ends so, with the tokens that it would have had."""
    mailbox = Watched(lambda slot: mailbox.cancel(slot) if mailbox.pushed == 2 else None)
    mailbox.post(ASKED["greedy"].request(tokens=LONG_ENOUGH))
    with opened(c) as backend:
        backend.generate(mailbox)
    *steps, last = mailbox.read(0, 0)
    tokens = [step.token for step in steps if isinstance(step, Step)]
    ended = isinstance(last, Step) and last.finish == "cancel"
    return ended and len(tokens) >= 2 and tokens[:TOKENS] == expected(CASE)[: len(tokens)]


LIVES: dict[str, Callable[[Conditions], bool]] = {
    "masks": masked_well,
    "yields": yielded_well,
    "cancelled after two tokens": cancelled_well,
}
