"""Requests in token columns on a Hopper GPU: each leaves what it leaves alone, bit for bit."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.shapes import named_shape
from kog_triton.model.small import small_model
from kog_triton.model.spec import DType, Head
from kog_triton.request_check import check_requests
from tests.lib.cuda_requests import held, prompt_of, request, run
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.real_shapes import real_shape
from tests.lib.ring_walker import spec_of
from tests.lib.two_gpus import skip_without_two

pytestmark = pytest.mark.gpu
SPECS = {
    "biases, norms, windows": spec_of(
        dtype=DType.F16, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
        windows=(5, 0, 90), max_context=512,
    ),
    "mean": mixed_lanes(Head.MEAN, max_context=512),
    "sum": mixed_lanes(Head.SUM_THEN_NORM, max_context=512),
    "vocab parallel": mixed_lanes(Head.VOCAB_PARALLEL, max_context=512),
    "llama-3.2-1b": named_shape("llama-3.2-1b"),
    "laneformer-2b": named_shape("laneformer-2b").replace(dtype=DType.F16),
    "side by side": mixed_lanes(Head.CONCAT, max_context=512),
    # Four rows a fragment of x; a K beyond shared memory, of few units and of more; a ring as long as its window.
    "qwen2.5-0.5b": real_shape("qwen2.5-0.5b"),
    "llama-3.1-8b": real_shape("llama-3.1-8b", 4),
    "qwen2.5-7b": real_shape("qwen2.5-7b", 4),
    "qwen2.5-14b": real_shape("qwen2.5-14b", 4),
}  # fmt: skip


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "laneformer-2b"])
def test_all_kernels_pass_the_check_of_a_new_gpu(name, gpus):
    if gpus > 1:
        skip_without_two()
    small = small_model(named_shape(name), num_gpus=gpus)
    assert len(check_requests(CudaBackend, small, "an NVIDIA GPU", 8, gpus)) == 6


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("columns", [2, 8])
def test_requests_together_leave_what_each_leaves_alone(name, columns):
    spec, count = SPECS[name], 40
    options = BackendOptions(device="nvidia", max_context=512, num_slots=columns, prefill="kernel")
    backend = CudaBackend(RandomWeights(spec, device="cuda"), options)
    backend.columns.ready(columns)  # begins to compile
    backend.settle()  # prompts in chunks every time: all requests end with one step, and no other kernel is wanted
    prompts = [[t % spec.vocab_size for t in prompt_of(3 + 5 * i, i)] for i in range(columns)]
    requests = [request(i, p, count) for i, p in enumerate(prompts)]
    alone = [(run(backend, r)[r.slot], held(backend, r.slot, len(r.prompt) + count - 1)) for r in requests]
    backend.memory.cache.zero_()
    together = run(backend, *requests)
    for r, (steps, cache) in zip(requests, alone, strict=True):
        assert together[r.slot] == steps
        assert torch.equal(held(backend, r.slot, len(r.prompt) + count - 1), cache)
    assert [k.layout.columns for k in backend.columns.kernels] == [columns]
    backend.close()
