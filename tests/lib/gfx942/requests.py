"""The requests that the Triton kernel's machine code runs, and the tokens that they must give."""

from dataclasses import dataclass
from functools import cache

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Request
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.sampling import History, SamplingParams, sample
from tests.lib.gfx942.triton_backend import Conditions, ExecutedBackend, serve
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.lowering_cases import ArrayWeights

TOKENS = 8
ENDS = 3  # which of them a stop id is made of


@dataclass(frozen=True)
class Asked:
    """A request; `variant` is the kernel that it takes."""

    params: SamplingParams
    prompt: tuple[int, ...] = (3, 42, 12)
    variant: str = ""


ASKED = {
    "greedy": Asked(SamplingParams(temperature=0.0)),
    "sampled": Asked(SamplingParams(temperature=1.7, seed=2**63 + 11)),
    "long prompt": Asked(
        SamplingParams(temperature=0.0), tuple((7 * i + 3) % 50 for i in range(37)), "chunks"
    ),
    "rules": Asked(
        SamplingParams(temperature=0.9, top_p=0.8, top_k=20, frequency_penalty=0.5, seed=6),
        variant="rules",
    ),
}


@cache
def expected(case: str, name: str = "greedy") -> list[int]:
    """The reference's tokens: by the definition of sampling from the reference's logits.

    Those of a 16-bit kernel differ a little: these requests are such that no token changes.
    """
    reference, asked = (
        ReferenceBackend(ArrayWeights(CASES[case].spec), BackendOptions()),
        ASKED[name],
    )
    history = History(asked.prompt)
    for i in range(TOKENS):
        logits = reference.forward_logits([*asked.prompt, *history.output])[-1]
        history.append(sample(logits, asked.params, history, len(asked.prompt) + i, 0).token)
    return history.output


def run_request(case: str, conditions: Conditions, name: str = "greedy") -> list[int]:
    """Tokens of one request that runs to its length, in the kernel that it takes. AssertionError if it fails."""
    asked, backend = ASKED[name], ExecutedBackend(case, conditions)
    params = asked.params
    (steps,) = serve(backend, Request(0, asked.prompt, params, params.seed or 0, TOKENS))
    assert [getattr(step, "finish", step) for step in steps] == [None] * (TOKENS - 1) + ["length"]
    assert list(backend.kernels) == [asked.variant]
    return [step.token for step in steps]
