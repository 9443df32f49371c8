"""The HIP kernel's own source on an NVIDIA GPU: named shapes of full size against the reference.

What its C++ computes of a whole model, on as many blocks as the GPU has room for; AMD's instructions and memory are the
executor's (tests/gfx942) to judge.
"""

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.shapes import named_shape
from kog_triton.model.small import small_model
from kog_triton.request_check import check_requests
from kog_triton.sampling import SamplingParams
from kog_triton.stage_check import check_stages
from tests.lib.cuda_requests import held, request, run
from tests.lib.hip_nvidia import HipOnNvidia
from tests.lib.machine_code import spec_named
from tests.lib.real_shapes import real_shape

pytestmark = pytest.mark.gpu
SPECS = {  # positions compared, most that logits may be off: at least 1.5 times what an H200 had (docs/HIP.md)
    "llama-3.2-1b": (named_shape("llama-3.2-1b"), 80, 0.4),
    "laneformer-2b": (spec_named("laneformer-2b"), 60, 0.03),
    "llama-3.1-8b": (real_shape("llama-3.1-8b", 4), 80, 0.08),
    "qwen3-0.6b": (named_shape("qwen3-0.6b"), 80, 0.45),
}
COLUMNS = {"llama-3.2-1b": 4, "qwen3-0.6b": 8, "llama-3.1-8b": 2}
TOLD = SamplingParams(temperature=0, logprobs=5)
NEAR = 0.5  # of logarithms that two orders of sums make of the same values; an H200 had 0.29 at most


def ids_of(spec, count, seed=0):
    return np.random.default_rng(seed).integers(0, spec.vocab_size, count).tolist()


def opened(spec, num_slots=1, **kernels):
    options = BackendOptions(num_slots, 512, prefill="kernel" if kernels else "decode")
    return HipOnNvidia(RandomWeights(spec, device="cuda"), options, **kernels)


@pytest.mark.parametrize("name", SPECS)
def test_logits_of_a_full_model_agree_with_the_reference_and_repeat(name):
    spec, count, limit = SPECS[name]
    tokens = ids_of(spec, count)
    ours = opened(spec)
    got = ours.forward_logits(tokens)
    assert np.array_equal(got, ours.forward_logits(tokens))
    expected = ReferenceBackend(RandomWeights(spec, device="cuda"), BackendOptions(device="nvidia")).forward_logits(
        tokens
    )
    assert expected.std() > 1
    assert np.sqrt(((got - expected) ** 2).mean()) < limit
    ours.close()


@pytest.mark.parametrize(("name", "count"), [("llama-3.2-1b", 12), ("laneformer-2b", 23)])
def test_every_stage_alone(name, count):
    assert check_stages(HipOnNvidia, small_model(SPECS[name][0]), "an NVIDIA GPU") == count


@pytest.mark.parametrize("name", ["llama-3.2-1b", "laneformer-2b"])
def test_all_kernels_pass_the_check_of_a_new_gpu(name):
    class Several(HipOnNvidia):
        def __init__(self, weights, options):
            super().__init__(weights, options, (2, 4, 8), 8)

    assert len(check_requests(Several, small_model(SPECS[name][0]), "an NVIDIA GPU", 8)) == 5


def assert_alike(steps, others):
    """Tokens of the same logarithms nearly, until one that was as likely nearly as what was chosen instead."""
    for one, other in zip(steps, others, strict=True):
        likely = dict(one.top)
        assert other.token in likely and one.logprob - likely[other.token] < NEAR
        assert abs(other.logprob - likely[other.token]) < NEAR
        if one.token != other.token:
            return


@pytest.mark.parametrize("name", COLUMNS)
def test_requests_that_share_a_step_say_what_each_says_alone(name):
    spec, columns = SPECS[name][0], COLUMNS[name]
    backend = opened(spec, columns, column_counts=(columns,))
    requests = [request(i, ids_of(spec, 3 + 5 * i, i), 40, TOLD) for i in range(columns)]
    alone = [run(backend, r)[r.slot] for r in requests]
    together = run(backend, *requests)
    assert [kernel.layout.columns for kernel in backend.columns.kernels] == [columns]
    for r, steps in zip(requests, alone, strict=True):
        assert len(steps) == 40
        assert_alike(steps, together[r.slot])
    backend.close()


def test_a_prompt_in_chunks_leaves_what_it_leaves_a_token_at_a_time_nearly():
    spec = SPECS["llama-3.2-1b"][0]
    prompt = ids_of(spec, 60)
    kept, said = [], []
    for positions in (0, 4):
        backend = opened(spec, positions=positions)
        (steps,) = run(backend, request(0, prompt, 8, TOLD)).values()
        assert (backend.chunks.kernel is not None) == bool(positions)
        said.append(steps)
        kept.append(held(backend, 0, len(prompt)).float())
        backend.close()
    assert_alike(*said)
    one, chunked = kept
    assert (one - chunked).square().mean() < 0.02**2 * one.square().mean()
