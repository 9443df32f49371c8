"""Whole requests by the Triton kernel's own machine code for gfx942: prompt, decode, sampling, end.

Tokens equal the reference's in both memories, whatever the order of waves, XCDs and evictions. The seeds of a plain run
are few; `python -m tests.gfx942.record` runs many.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: Triton compiles for that", allow_module_level=True)

from kog_triton.backends.mailbox import Failure, Step
from tests.lib.gfx942 import requests
from tests.lib.gfx942.executor import WEAK, Memory
from tests.lib.gfx942.requests import ASKED, ENDS, LIVES, expected, run_request
from tests.lib.gfx942.triton_backend import Conditions, ExecutedBackend, serve
from tests.lib.gfx942.triton_cases import CASES, LATE

RUNS = [Conditions(Memory(quantum=4000), 1), Conditions(WEAK, 2, xcc=lambda group: group * 5 % 7)]


IDS = ["plain", "adversarial"]
GREEDY = ASKED["greedy"]


@pytest.mark.parametrize("conditions", RUNS, ids=IDS)
@pytest.mark.parametrize("case", CASES)
def test_greedy_requests_equal_the_reference(case, conditions):
    assert run_request(case, conditions) == expected(case)


@pytest.mark.parametrize("conditions", RUNS, ids=IDS)
def test_sampled_requests_equal_the_definition(conditions):
    assert run_request("llama", conditions, "sampled") == expected("llama", "sampled")


@pytest.mark.parametrize("conditions", [pytest.param(RUNS[0], marks=pytest.mark.slow), RUNS[1]], ids=IDS)
def test_a_prompt_in_chunks_equals_the_reference(conditions):
    """Its vectors are shorter than a block has threads, several of which load what one stores."""
    assert run_request("llama", conditions, "long prompt") == expected("llama", "long prompt")


@pytest.mark.slow
@pytest.mark.parametrize("conditions", RUNS, ids=IDS)
@pytest.mark.parametrize("case", LATE)
def test_layers_in_the_order_of_laneformer_2b(case, conditions):
    assert run_request(case, conditions) == expected(case)


@pytest.mark.slow
@pytest.mark.parametrize("conditions", RUNS, ids=IDS)
@pytest.mark.parametrize("name", [name for name, asked in ASKED.items() if asked.variant])
@pytest.mark.parametrize("case", CASES)
def test_other_variants_of_the_kernel(case, name, conditions):
    """Prompts in chunks, on matrix units; penalties and cuts."""
    assert run_request(case, conditions, name) == expected(case, name)


def test_a_stop_id_ends_the_request():
    tokens = expected("llama")
    stop = frozenset({tokens[ENDS]})
    (steps,) = serve(ExecutedBackend("llama", RUNS[1]), GREEDY.request(stops=stop))
    assert [step.token for step in steps] == tokens[: tokens.index(tokens[ENDS]) + 1]
    assert steps[-1].finish == "stop"


@pytest.mark.parametrize("conditions", RUNS, ids=IDS)
@pytest.mark.parametrize("life", LIVES)
def test_a_request_that_is_interrupted(life, conditions):
    """Counts of edited ids, the host's masks, positions and prompts half done outlive every launch; a cancelled request
    ends at a token."""
    assert LIVES[life]("llama", conditions)


def test_a_token_too_much_after_a_cancel_is_seen(monkeypatch):
    wrong = [Step(token) for token in expected("llama")[:3]] + [Step(-1, "cancel")]
    monkeypatch.setattr(requests, "run_cancelled", lambda *_: wrong)
    assert not requests.cancelled_well("llama", RUNS[0], 0)
    assert requests.cancelled_well("llama", RUNS[0], 2)


def test_a_wait_for_words_that_never_come_ends_the_launch():
    """Block 0 does not publish its rows of qkv: the others write down what they waited for, and all leave."""
    backend = ExecutedBackend("llama", RUNS[0], limit=300)
    kernel = backend.kernel("")
    names = kernel.mnemonics()
    first = next(
        i for i, name in enumerate(names) if name.startswith("BUFFER_STORE") and kernel.records["scope"][i] == 3
    )
    kernel.replace(first, "S_NOP")
    (steps,) = serve(backend, GREEDY.request(tokens=2))
    (failure,) = steps
    assert isinstance(failure, Failure) and "a wait of the triton kernel expired" in str(failure.error)
