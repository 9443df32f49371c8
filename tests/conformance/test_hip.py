"""What the HIP kernel does not do is refused by name, or said before anybody is served.

All else is asked of it by the rest of the suite, where "hip on a CPU" is one of the backends.
"""

import pytest

from kog_triton.backends import BackendOptions, find_backend, why_not_narrow
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from tests.lib import narrow_cases
from tests.lib.conformance_backends import HIP
from tests.lib.conformance_requests import TOGETHER
from tests.lib.hip_walk import HipFiberBackend
from tests.lib.refusals import refusal
from tests.lib.ring_walker import spec_of

pytestmark = pytest.mark.usefixtures("one_thread")
SPEC = spec_of(dtype=DType.F16, num_layers=1, vocab_size=100, max_context=64)


def opened(kind=HipFiberBackend, **options):
    return kind(RandomWeights(SPEC), BackendOptions(num_slots=4, max_context=24, **options))


@pytest.mark.parametrize("form", ["fp8_block", "mxfp4"])
def test_narrow_weights_are_refused_by_their_form(form, tmp_path):
    narrow_cases.checkpoint(form, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    hip, spec = find_backend("hip"), checkpoint.spec
    why = f"its kernel reads 16-bit weights, and these are {spec.narrow_formats}"
    assert why_not_narrow(hip, spec) == why and why_not_narrow(hip, spec.replace(narrow=())) == ""
    told = refusal(lambda: HipFiberBackend(checkpoint, BackendOptions()))
    assert told == f"backend hip cannot run this checkpoint: {why}; choose --backend reference"


def test_weights_of_32_bits_are_refused():
    assert "hip backend reads 16-bit weights" in refusal(lambda: opened(dtype="fp32"))


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_library_of_prompts_is_refused(gpus):
    told = refusal(lambda: opened(prefill="library", num_gpus=gpus))
    assert told.endswith("is gfx942: choose --prefill kernel") and "products of prompts" in told


@pytest.mark.parametrize("gpus", [1, 2])
def test_ranks_have_the_columns_of_one_gpu(gpus):
    backend = opened(TOGETHER[f"{HIP}, together"], num_gpus=gpus)
    assert backend.columns.counts == (4,)
    assert backend.kernels_of_several() == [(4, False), (4, True)]
