"""The requests that the Triton kernel's machine code runs, and the tokens that they must give."""

from functools import cache

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Request
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.sampling import SamplingParams
from tests.lib.gfx942.triton_backend import Conditions, ExecutedBackend, serve
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.lowering_cases import ArrayWeights

PROMPT = (3, 42, 12)
TOKENS = 8
ENDS = 3  # which of them a stop id is made of
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.7, seed=2**63 + 11)


@cache
def expected(case: str) -> list[int]:
    """The reference's tokens, greedy."""
    reference = ReferenceBackend(ArrayWeights(CASES[case].spec), BackendOptions())
    tokens = list(PROMPT)
    for _ in range(TOKENS):
        tokens.append(int(reference.forward_logits(tokens)[-1].argmax()))
    return tokens[len(PROMPT) :]


def run_request(case: str, conditions: Conditions, params: SamplingParams) -> list[int]:
    """Tokens of one request that runs to its length. AssertionError if it fails."""
    (steps,) = serve(
        ExecutedBackend(case, conditions), Request(0, PROMPT, params, params.seed or 0, TOKENS)
    )
    assert [getattr(step, "finish", step) for step in steps] == [None] * (TOKENS - 1) + ["length"]
    return [step.token for step in steps]
