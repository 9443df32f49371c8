"""Whole requests by the Triton kernel's own machine code for gfx942: prompt, decode, sampling, end.

Tokens equal the reference's in both memories, whatever the order of waves, XCDs and evictions. The seeds of a plain run
are few; `python -m tests.gfx942.record` runs many.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: Triton compiles for that", allow_module_level=True)

from kog_triton.backends.mailbox import Failure, Request
from tests.lib.gfx942.executor import WEAK, Memory
from tests.lib.gfx942.requests import ASKED, ENDS, expected, run_request
from tests.lib.gfx942.triton_backend import Conditions, ExecutedBackend, serve
from tests.lib.gfx942.triton_cases import CASES

RUNS = [
    Conditions(Memory(quantum=4000), 1),
    Conditions(WEAK, 2, xcc=lambda group: group * 5 % 7),
]


IDS = ["plain", "adversarial"]
GREEDY = ASKED["greedy"]


@pytest.mark.parametrize("conditions", RUNS, ids=IDS)
@pytest.mark.parametrize("case", CASES)
def test_greedy_requests_equal_the_reference(case, conditions):
    assert run_request(case, conditions) == expected(case)


@pytest.mark.parametrize("conditions", RUNS, ids=IDS)
def test_sampled_requests_equal_the_definition(conditions):
    assert run_request("llama", conditions, "sampled") == expected("llama", "sampled")


@pytest.mark.slow
@pytest.mark.parametrize("conditions", RUNS, ids=IDS)
@pytest.mark.parametrize("name", ["long prompt", "rules"])
@pytest.mark.parametrize("case", CASES)
def test_other_variants_of_the_kernel(case, name, conditions):
    """Prompts in chunks, on matrix units; penalties and cuts."""
    assert run_request(case, conditions, name) == expected(case, name)


def test_a_stop_id_ends_the_request():
    tokens = expected("llama")
    stop = frozenset({tokens[ENDS]})
    request = Request(0, GREEDY.prompt, GREEDY.params, 0, len(tokens), stop_token_ids=stop)
    (steps,) = serve(ExecutedBackend("llama", RUNS[1]), request)
    assert [step.token for step in steps] == tokens[: tokens.index(tokens[ENDS]) + 1]
    assert steps[-1].finish == "stop"


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
    (steps,) = serve(backend, Request(0, GREEDY.prompt, GREEDY.params, 0, 2))
    (failure,) = steps
    assert isinstance(failure, Failure) and "a wait of the triton kernel expired" in str(
        failure.error
    )
