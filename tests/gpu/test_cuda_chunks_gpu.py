"""Prompts in chunks on a Hopper GPU: what they leave is what a token at a time leaves, bit for bit."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType, Head
from tests.lib.cuda_requests import held, prompt_of, request, run
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.real_shapes import real_shape
from tests.lib.ring_walker import spec_of

pytestmark = pytest.mark.gpu
SPECS = {
    "biases, norms, windows": spec_of(
        dtype=DType.F16, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
        windows=(5, 0, 90), max_context=4096,
    ),
    "lanes": mixed_lanes(Head.MEAN, max_context=4096),
    "lanes, rows of each": mixed_lanes(Head.VOCAB_PARALLEL, max_context=4096),
    "lanes side by side": mixed_lanes(Head.CONCAT, max_context=4096),
    "laneformer-2b": named_shape("laneformer-2b").replace(dtype=DType.F16),
    "llama-3.2-1b": named_shape("llama-3.2-1b"),
    "qwen3-0.6b": named_shape("qwen3-0.6b"),
    # Four rows a fragment of x; a K beyond shared memory; a ring as long as its window.
    "tinyllama-1.1b": real_shape("tinyllama-1.1b"),
    "llama-3.1-8b": real_shape("llama-3.1-8b", 4),
    "qwen2.5-14b": real_shape("qwen2.5-14b", 4),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_chunks_leave_what_a_token_at_a_time_leaves(monkeypatch, name):
    weights = RandomWeights(SPECS[name], device="cuda")
    options = BackendOptions(device="nvidia", max_context=4096, prefill="kernel")
    backend = CudaBackend(weights, options)
    backend.settle()
    assert backend.chunks.kernel is not None
    for length, cached in ((3, 0), (9, 0), (130, 0), (145, 129), (700, 0), (2100, 0), (2120, 2099)):
        prompt, got = prompt_of(length), []
        for kernel in (None, backend.chunks.kernel):
            if not cached:
                backend.memory.cache.zero_()
            with monkeypatch.context() as patch:
                patch.setattr(backend.chunks, "kernel", kernel)
                steps = run(backend, request(0, prompt, 6, cached=cached))[0]
            got.append((steps, held(backend, 0, length + 5)))
        assert got[0][0] == got[1][0]
        assert torch.equal(got[0][1], got[1][1])
    backend.close()
