"""Narrow weights in the Triton kernel, interpreted, against the reference on what they stand for."""

import os

import pytest
import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip(
        "Triton compiles for the GPU here: run on a machine without one", allow_module_level=True
    )

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.triton.kernel import codes
from kog_triton.backends.triton.kernel.chunk import CHUNKS_FROM
from kog_triton.schedule.triton_codes import TileCodes
from tests.lib.narrow_stages import STAGES
from tests.lib.triton_cases import GREEDY, InterpretedBackend
from tests.lib.triton_narrow import CASES, assert_near, weights_of

# Judged by the slow tests: others have the same code with other numbers.
RARE = {"fp8 blocks", "fp8 channels", "int8 channels", "int4 g32", "fp8 blocks, odd sizes"}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow) if c in RARE else c for c in CASES]
)
def test_stages_compute_what_the_unpacked_values_say(case):
    weights = weights_of(case)
    ours = InterpretedBackend(weights, BackendOptions())
    reference = ReferenceBackend(weights, BackendOptions())
    for stage in STAGES:
        assert_near(ours, reference, stage)


@pytest.mark.parametrize("prefill", ["kernel", pytest.param("library", marks=pytest.mark.slow)])
def test_requests_take_turns_whose_prompts_go_a_token_at_a_time_or_by_the_library(prefill):
    """Though one is long enough for the kernel's pass of many tokens, which narrow weights have none of."""
    weights = weights_of("int4 g32")
    options = BackendOptions(num_slots=2, max_context=32, prefill=prefill)
    backend = InterpretedBackend(weights, options)
    prompts = [tuple(range(5, 5 + CHUNKS_FROM.value + 2)), (7, 9)]
    requests = [Request(i, p, GREEDY, seed=0, max_tokens=2) for i, p in enumerate(prompts)]
    mailbox = Mailbox()
    for request in requests:
        mailbox.post(request)
    backend.generate(mailbox)
    for request in requests:
        steps = mailbox.read(request.slot, 0)
        assert len(steps) == 2
        said = [*request.prompt, *(step.token for step in steps)]
        logits = backend.forward_logits(said[:-1])
        assert logits[len(request.prompt) - 1 :].argmax(-1).tolist() == said[-2:]


@triton.jit
def even_codes(w, HALF: tl.constexpr, T: tl.constexpr):
    return (w << 4) & -0x0F0F0F10


FAULTS = {
    "codes as large as their bytes": (TileCodes, "lift", 1),
    "the odd codes of a word as the even ones": (codes, "codes_in", even_codes),
    "operands of half a byte more": (codes, "ROUNDER", tl.constexpr(1.5 * 2**23)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    weights = weights_of("int4 g32")
    ours = InterpretedBackend(weights, BackendOptions())
    reference = ReferenceBackend(weights, BackendOptions())
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        assert_near(ours, reference, "o_proj")
