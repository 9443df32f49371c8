"""What the contract has of HIP's own: what its kernel does not do is refused by name, or said before anybody is served.

All else is asked of it by the suite, where "hip on a CPU" is one of the backends: faults of headers that it alone
compiles are seen by those tests.
"""

import logging
from functools import partial

import pytest

from kog_triton.backends import BackendOptions, find_backend, why_not_narrow
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from tests.conformance import test_conformance as stages
from tests.conformance import test_conformance_requests as requests
from tests.lib import narrow_cases
from tests.lib.conformance_backends import HIP
from tests.lib.conformance_requests import TOGETHER
from tests.lib.hip_walk import HIP as SOURCES
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
def test_ranks_say_that_they_have_no_columns(gpus, caplog):
    """Of a backend that has kernels of columns on one GPU, where nothing is said."""
    caplog.set_level(logging.INFO)
    backend = opened(TOGETHER[f"{HIP}, together"], num_gpus=gpus)
    several = backend.columns.counts, backend.kernels_of_several()
    said = "2 GPUs have no kernel of several columns: requests take turns, prompts run a token at a time"
    assert (said in caplog.messages) == (gpus == 2)
    assert several == (((4,), [(4, False), (4, True)]) if gpus == 1 else ((), []))


# ---- planted faults ----

TOGETHER_ONE, STEPS = (f"{HIP}, together", "one lane"), (HIP, "all options, steps of four")
# header, before, after, the backend, who must see it
FAULTS = {
    "half of what columns have of K, twice": (
        "mma/products.h", "{w.z, w.w}, {columns[2], columns[3]}", "{w.x, w.y}, {columns[0], columns[1]}",
        *TOGETHER_ONE, "",
    ),
    "another's column": (
        "mma/operands.h", "thread / kSetColumns * kTokens + thread % kSetColumns % kTokens;",
        "thread / kSetColumns * kTokens + (thread + 1) % kSetColumns % kTokens;", *TOGETHER_ONE, "",
    ),
    "threads of a row that do not meet": (
        "dot/products.h", "mask = 1; mask <", "mask = 2; mask <", *STEPS, "qkv_proj",
    ),
    "a score of another key": (
        "scores.h", "shuffle(mine[0], from + 4 * i)", "shuffle(mine[0], from + 4 - 4 * i)", *STEPS, "attention",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_of_a_header_of_its_own_is_seen(fault, tmp_path, monkeypatch):
    """By a stage alone, or by requests that share steps."""
    header, before, after, name, model, stage = FAULTS[fault]
    if stage:
        backend, _ = stages.opened(name, model)
        test = partial(stages.test_a_stage_computes_what_the_reference_says, name, model, stage)
    else:
        backend = requests.opened(name, model)
        test = partial(requests.test_requests_at_once_say_what_each_says_alone, name, model)
    test()  # which opens all kernels that it runs
    text = (SOURCES / "include/kog" / header).read_text()
    assert text.count(before) == 1
    path = tmp_path / "kog" / header
    path.parent.mkdir(parents=True)
    path.write_text(text.replace(before, after))
    for kernel in backend._kernels:
        monkeypatch.setattr(kernel, "library", kernel.compiled(ahead=(tmp_path,)))
    with pytest.raises(AssertionError):
        test()
