"""A narrow embedding in the Triton kernel: bit for bit what its values are as 16 bits, in the bytes of its codes."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.triton.host.memory import plan_of
from tests.lib.narrow_embedding import CASES, pair
from tests.lib.slow import some_always
from tests.lib.triton_cases import GREEDY, InterpretedBackend


@pytest.mark.parametrize("case", CASES)
def test_a_token_has_the_values_of_its_row(case):
    narrow, wide = (InterpretedBackend(weights, BackendOptions()) for weights in pair(case))
    bytes_ = [b.memory.pointers.embed.nbytes for b in (narrow, wide)]
    assert bytes_[0] < bytes_[1]
    plans = [plan_of(b.schedule, b.tiles, 1).weights for b in (narrow, wide)]
    assert plans[1] - plans[0] == bytes_[1] - bytes_[0]
    vocab = narrow.spec.vocab_size
    given = {"token_ids": torch.tensor([0, 1, 42, vocab - 2, vocab - 1])}
    x = [b.run_stage("embed", 0, given)["x"] for b in (narrow, wide)]
    assert x[0].any() and torch.equal(*x)


def served(weights, slots, **options):
    backend = InterpretedBackend(weights, BackendOptions(num_slots=slots, max_context=32, **options))
    mailbox = Mailbox()
    for slot in range(slots):
        mailbox.post(Request(slot, (3 + slot, 42, 7, 9, 30), GREEDY, seed=0, max_tokens=3))
    backend.generate(mailbox)
    return [[s.token for s in mailbox.read(slot, 0)] for slot in range(slots)], backend.memory.pointers


RUNS = {
    "alone": ("int4 g32, minimums (Q4_1)", 1, {}),
    "that share steps": ("int8 g32 (Q8_0)", 2, {}),
    "in chunks": ("int4 g32 (Q4_0)", 1, {"prefill": "kernel"}),
    "by the library": ("mxfp4", 1, {"prefill": "library"}),
}


@pytest.mark.parametrize("run", some_always(RUNS, "that share steps", "by the library"))
def test_requests(run):
    case, slots, options = RUNS[run]
    (tokens, ours), (wanted, theirs) = (served(w, slots, **options) for w in pair(case))
    assert tokens == wanted and all(len(of) == 3 for of in tokens)
    assert ours.kv.any() and torch.equal(ours.kv, theirs.kv)
    assert torch.equal(ours.logits, theirs.logits)
