"""Whole requests by the Triton kernel's own machine code for gfx942: prompt, decode, sampling, end.

Tokens equal the reference's in both memories, whatever the order of waves, XCDs and evictions. The seeds of a plain run
are few; `python -m tests.gfx942.record` runs many.
"""

import os
from functools import cache

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: Triton compiles for that", allow_module_level=True)

from kog_triton.backends.mailbox import Failure, Request
from tests.lib.gfx942.executor import WEAK, Memory
from tests.lib.gfx942.requests import ENDS, GREEDY, PROMPT, SAMPLED, expected, run_request
from tests.lib.gfx942.triton_backend import Conditions, ExecutedBackend, serve
from tests.lib.gfx942.triton_cases import CASES

RUNS = [
    Conditions(Memory(quantum=4000), 1),
    Conditions(WEAK, 2, xcc=lambda group: group * 5 % 7),
]


@pytest.mark.parametrize("conditions", RUNS, ids=["plain", "adversarial"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_requests_equal_the_reference(case, conditions):
    assert run_request(case, conditions, GREEDY) == expected(case)


def test_a_stop_id_ends_the_request():
    tokens = expected("llama")
    (steps,) = serve(
        ExecutedBackend("llama", RUNS[1]),
        Request(0, PROMPT, GREEDY, 0, len(tokens), stop_token_ids=frozenset({tokens[ENDS]})),
    )
    assert [step.token for step in steps] == tokens[: tokens.index(tokens[ENDS]) + 1]
    assert [step.finish for step in steps][-1] == "stop"


@cache
def sampled(case: str) -> list[int]:
    return run_request(case, RUNS[0], SAMPLED)


def test_sampled_tokens_are_the_definition_s():
    """Of the kernel's own logits; and the same in the other memory."""
    from kog_triton.sampling import History, sample

    backend = ExecutedBackend("llama", RUNS[1])
    made = run_request("llama", RUNS[1], SAMPLED)
    logits = backend.forward_logits([*PROMPT, *made[:-1]])
    for i, token in enumerate(made):
        row = logits[len(PROMPT) - 1 + i]
        assert token == sample(row, SAMPLED, History(PROMPT), len(PROMPT) + i, 0).token
    assert sampled("llama") == made


def test_a_wait_for_words_that_never_come_ends_the_launch():
    """Block 0 does not publish its rows of qkv: the others write down what they waited for, and all leave."""
    backend = ExecutedBackend("llama", RUNS[0], limit=300)
    kernel = backend.kernel("")
    names = kernel.mnemonics()
    first = next(
        i
        for i, name in enumerate(names)
        if name.startswith("BUFFER_STORE") and kernel.records["scope"][i] == 3
    )
    kernel.replace(first, "S_NOP")
    (steps,) = serve(backend, Request(0, PROMPT, GREEDY, 0, 2))
    (failure,) = steps
    assert isinstance(failure, Failure) and "a wait of the triton kernel expired" in str(
        failure.error
    )
