"""The kernel of deep positions on a Hopper GPU: a request that gets deep goes on by it, with the same bits."""

import gc

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.deep import LEAST
from kog_triton.bench.model import open_model
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import request, run, serve, timeless
from tests.lib.ring_walker import spec_of
from tests.lib.two_gpus import skip_without_two

pytestmark = pytest.mark.gpu


class RoundRobin(CudaBackend):
    """Requests take turns, a token each."""

    column_counts = ()


class Plain(RoundRobin):
    deep_kernel = False


SPECS = {
    "fp16, windows": spec_of(dtype=DType.F16, windows=(5, 0, 900), max_context=4096),
    "one key head, head_dim 24": spec_of(
        dtype=DType.F16, hidden_size=200, num_heads=10, num_kv_heads=1, head_dim=24, max_context=4096
    ),
    "llama-3.2-1b": named_shape("llama-3.2-1b"),
    "laneformer-2b": named_shape("laneformer-2b").replace(dtype=DType.F16),
}


def opened(kind, weights, num_gpus=1):
    asked = BackendOptions(2, 3072, num_gpus=num_gpus, device="nvidia", prefill="kernel")
    backend = kind(weights, asked)
    backend.settle()
    return backend


def prompt_of(spec, count, seed):
    ids = torch.randint(0, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))
    return ids.tolist()


def weights_named(name):
    if name in SPECS:
        return RandomWeights(SPECS[name], device="cuda")
    shape, how = name.split()
    return open_model(None, shape, torch.device("cuda"), "auto", how).weights


def check_tokens(weights, num_gpus):
    spec = weights.spec
    params = SamplingParams(temperature=0.7, seed=11, logprobs=2)
    near = request(0, prompt_of(spec, LEAST - 100, 1), 400, params=params)
    deep = request(1, prompt_of(spec, 2 * LEAST, 2), 200, params=params)
    found = []
    for kind in (Plain, RoundRobin):
        backend = opened(kind, weights, num_gpus)
        one = timeless(run(backend, near)[0])
        both = serve(backend, near, deep)
        found.append((one, {slot: timeless(steps) for slot, steps in both.items()}))
        assert (backend.deep._kernel is not None) == (kind is RoundRobin)
        backend.close()
        gc.collect()
    assert found[0] == found[1]


@pytest.mark.parametrize("name", [*SPECS, "qwen3-0.6b fp8-block", "qwen3-0.6b int4-g128"])
def test_a_request_has_the_same_tokens_as_it_gets_deep(name):
    check_tokens(weights_named(name), num_gpus=1)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "laneformer-2b"])
def test_a_request_on_two_gpus_has_the_same_tokens_as_it_gets_deep(name):
    skip_without_two()
    check_tokens(weights_named(name), num_gpus=2)


def test_a_profile_is_of_the_kernel_that_serves_its_depth():
    backend = opened(RoundRobin, RandomWeights(named_shape("llama-3.2-1b"), device="cuda"))
    spans = backend.profile(prompt_of(backend.spec, 64, 3), 4).spans
    assert backend.deep._kernel is None
    deep = backend.profile(prompt_of(backend.spec, 2 * LEAST, 3), 4)
    assert backend.deep._kernel is not None and deep.spans == spans
    backend.close()
