"""The requests that the Triton kernel's machine code runs, and the tokens that they must give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Failure, Mailbox, MaskHook, Request, Step
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.triton.kernel.slots import BEAT
from kog_triton.model.spec import ModelSpec
from kog_triton.sampling import History, SamplingParams, sample
from tests.lib.gfx942.triton_backend import Conditions, ExecutedBackend, serve
from tests.lib.gfx942.triton_cases import SMALL
from tests.lib.lowering_cases import ArrayWeights

TOKENS = 8
ENDS = 3  # which of them a stop id is made of
MASK_WORDS = 2  # of the cases' 50 ids


def thirds(output: Sequence[int]) -> np.ndarray:
    """A mask that allows every third id, others after every token."""
    return np.array([0x9249_2492 >> len(output) % 3] * MASK_WORDS, np.uint32)


@dataclass(frozen=True)
class Asked:
    """A request; `variant` is the kernel that it takes."""

    params: SamplingParams
    prompt: tuple[int, ...] = (3, 42, 12)
    variant: str = ""
    mask: MaskHook | None = None

    def request(self, slot: int = 0, tokens: int = TOKENS, stops: frozenset[int] = frozenset()) -> Request:
        seed = self.params.seed or 0
        return Request(slot, self.prompt, self.params, seed, tokens, stops, mask=self.mask)


LONG = tuple((7 * i + 3) % 50 for i in range(37))  # a prompt that is taken in chunks
ASKED = {
    "greedy": Asked(SamplingParams(temperature=0.0)),
    "sampled": Asked(SamplingParams(temperature=1.7, seed=2**63 + 11)),
    "long prompt": Asked(SamplingParams(temperature=0.0), LONG, "chunks"),
    "long prompt, rules": Asked(
        SamplingParams(temperature=0.9, top_k=12, presence_penalty=0.5, seed=7),
        LONG,
        "rules+chunks",
    ),
    "rules": Asked(
        SamplingParams(temperature=0.9, top_p=0.8, top_k=20, frequency_penalty=0.5, seed=6),
        variant="rules",
    ),
    "edits": Asked(  # without any one of them, the tokens of two cases of three at least are others
        SamplingParams(
            temperature=0.5,
            seed=26,
            repetition_penalty=1.6,
            presence_penalty=1.3,
            logit_bias={7: 3.0, 38: -4.0, 8: 2.0, 21: 4.0},
            allowed_token_ids=tuple(range(2, 44)),
            bad_words_token_ids=((17,), (26,), (7, 9), (8, 21), (21, 8)),
            min_tokens=4,
            end_token_ids=tuple(range(0, 50, 3)),
        ),
        variant="rules",
    ),
    "masks": Asked(SamplingParams(temperature=0.0), variant="rules", mask=thirds),
}  # fmt: skip


@cache
def expected(case: str, name: str = "greedy") -> list[int]:
    """The reference's tokens: by the definition of sampling from the reference's logits.

    Those of a 16-bit kernel differ a little: these requests are such that no token changes.
    """
    return reference_tokens(SMALL[case].spec, ASKED[name])


def reference_tokens(spec: ModelSpec, asked: Asked) -> list[int]:
    """Of any small model."""
    reference = ReferenceBackend(ArrayWeights(spec), BackendOptions())
    history = History(asked.prompt)
    for i in range(TOKENS):
        logits = reference.forward_logits([*asked.prompt, *history.output])[-1]
        mask = asked.mask(history.output) if asked.mask else None
        history.append(sample(logits, asked.params, history, len(asked.prompt) + i, 0, mask).token)
    return history.output


def tokens_of(steps: Sequence[Step | Failure]) -> list[int]:
    """Of a request that runs to its length. AssertionError if it does not."""
    ends = [getattr(step, "finish", step) for step in steps]
    assert ends == [None] * (TOKENS - 1) + ["length"], ends
    return [step.token for step in steps if isinstance(step, Step)]


def run_request(case: str, conditions: Conditions, name: str = "greedy") -> list[int]:
    """Tokens of one request that runs to its length, in the kernel that it takes. AssertionError if it fails."""
    backend = ExecutedBackend(case, conditions)
    (steps,) = serve(backend, ASKED[name].request())
    assert list(backend.kernels) == [ASKED[name].variant]
    return tokens_of(steps)


TOGETHER = ("rules", "masks")


def yielded_well(case: str, conditions: Conditions) -> bool:
    """Whether `run_yielding` makes what each request makes alone, in as many launches as passes that chose tokens."""
    made, launches = run_yielding(case, conditions)
    return made == [expected(case, name) for name in TOGETHER] and launches >= TOKENS


def run_yielding(case: str, conditions: Conditions) -> tuple[list[list[int]], int]:
    """Tokens of the requests TOGETHER, in two slots whose kernel is told to leave in every pass, and its launches."""
    backend, mailbox, launches = ExecutedBackend(case, conditions, len(TOGETHER)), Mailbox(), 0
    for slot, name in enumerate(TOGETHER):
        mailbox.post(ASKED[name].request(slot))

    def leave() -> None:
        if backend.memory.pointers.mailbox[0, BEAT]:
            mailbox.yield_now()

    backend.watch = leave
    while not launches or mailbox.resumed:
        mailbox.resume()
        backend.generate(mailbox)
        launches += 1
    return [tokens_of(mailbox.read(slot, 0)) for slot in range(len(TOGETHER))], launches


def cancelled_well(case: str, conditions: Conditions, made: int) -> bool:
    """Whether the greedy request, cancelled once `made` of its tokens have come, ends so, after two more at most."""
    *steps, last = run_cancelled(case, conditions, made)
    tokens = [step.token for step in steps if isinstance(step, Step)]
    ended = isinstance(last, Step) and last.finish == "cancel"
    return ended and made <= len(steps) <= made + 2 and tokens == expected(case)[: len(steps)]


def run_cancelled(case: str, conditions: Conditions, made: int) -> list[Step | Failure]:
    """Steps of the greedy request, cancelled once `made` of its tokens have come."""
    backend, mailbox = ExecutedBackend(case, conditions), Mailbox()
    came: list[Step | Failure] = []
    mailbox.post(ASKED["greedy"].request())

    def cancel() -> None:
        came.extend(mailbox.read(0, 0))
        if len(came) >= made:
            mailbox.cancel(0)

    backend.watch = cancel
    backend.generate(mailbox)
    return came + mailbox.read(0, 0)


# What a request may meet: whether all went as it must.
LIVES: dict[str, Callable[[str, Conditions], bool]] = {
    "yields at every token": yielded_well,
    "cancelled in its prompt": partial(cancelled_well, made=0),
    "cancelled after two tokens": partial(cancelled_well, made=2),
}
