"""Narrow weights in the Triton kernel on a GPU: every stage, whole requests, and who takes turns."""

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox, Request, Step
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.triton import TritonBackend
from kog_triton.sampling import SamplingParams
from tests.lib.narrow_stages import STAGES
from tests.lib.triton_narrow import CASES, assert_near, weights_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES)
def test_stages_compute_what_the_unpacked_values_say(case):
    weights = weights_of(case)
    ours = TritonBackend(weights, BackendOptions(device="nvidia"))
    reference = ReferenceBackend(weights, BackendOptions())  # on the CPU, where the inputs are
    for stage in STAGES:
        assert_near(ours, reference, stage)


@pytest.mark.parametrize("case", ["fp8 blocks", "int4 g128, zero points"])
def test_requests_in_turns_have_the_tokens_that_each_has_alone(case):
    weights = weights_of(case)
    backend = TritonBackend(weights, BackendOptions(device="nvidia", num_slots=3))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [tuple(range(3 + i, 40 + 7 * i)) for i in range(3)]

    def tokens(*slots):
        mailbox = Mailbox()
        for slot in slots:
            mailbox.post(Request(slot, prompts[slot], params, seed=slot, max_tokens=12))
        backend.generate(mailbox)
        steps = {slot: mailbox.read(slot, 0) for slot in slots}
        assert all(isinstance(step, Step) for found in steps.values() for step in found)
        return {slot: [step.token for step in found] for slot, found in steps.items()}

    together = tokens(0, 1, 2)
    assert all(len(found) == 12 for found in together.values())
    for slot in range(3):
        assert tokens(slot) == {slot: together[slot]}
    logits = backend.forward_logits(prompts[0])
    np.testing.assert_array_equal(backend.forward_logits(prompts[0]), logits)
