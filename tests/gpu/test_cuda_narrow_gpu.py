"""Narrow weights on a Hopper GPU: every stage against the reference on what they stand for, and requests together and
prompts in chunks against a token at a time, bit for bit."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.reference import ReferenceBackend
from tests.lib.cuda_requests import held, prompt_of, request, run
from tests.lib.narrow_stages import STAGES, assert_stage_agrees, weights_of

pytestmark = pytest.mark.gpu
# Of each kind of code and offset one, of scales each kind, and narrow heads.
CASES = (
    "fp8 blocks",
    "int4 g128",
    "int4 g32, float16",
    "int4 g128, zero points",
    "int4 g32, minimums (Q4_1)",
    "int8 g64, zero points",
    "int8 g32 and head (Q8_0)",
    "mxfp4",
)
COUNT = 24


def opened(case, **options):
    """The kernel of so many slots; its prompts come a token at a time until chunks are asked for."""
    return CudaBackend(weights_of(case), BackendOptions(device="nvidia", max_context=256, **options))


@pytest.mark.parametrize("case", CASES)
def test_a_narrow_stage_computes_what_the_unpacked_values_say(case):
    ours = opened(case, prefill="decode")
    reference = ReferenceBackend(weights_of(case), BackendOptions())
    for stage in STAGES:
        assert_stage_agrees(ours, reference, stage)
    ours.close()


@pytest.mark.parametrize("columns", [2, 8])
@pytest.mark.parametrize("case", CASES)
def test_narrow_requests_together_leave_what_each_leaves_alone(case, columns):
    """The prompts come in chunks, alone as together."""
    backend = opened(case, num_slots=columns, prefill="kernel")
    backend.columns.ready(columns)
    backend.settle()
    vocab = backend.spec.vocab_size
    prompts = [[t % vocab for t in prompt_of(3 + 5 * i, i)] for i in range(columns)]
    requests = [request(i, p, COUNT) for i, p in enumerate(prompts)]
    alone = [(run(backend, r)[r.slot], held(backend, r.slot, len(r.prompt) + COUNT - 1)) for r in requests]
    backend.memory.cache.zero_()
    together = run(backend, *requests)
    for r, (steps, cache) in zip(requests, alone, strict=True):
        assert together[r.slot] == steps
        assert torch.equal(held(backend, r.slot, len(r.prompt) + COUNT - 1), cache)
    assert [k.layout.columns for k in backend.columns.kernels] == [columns]
    backend.close()


@pytest.mark.parametrize("case", CASES)
def test_narrow_chunks_leave_what_a_token_at_a_time_leaves(monkeypatch, case):
    backend = opened(case, prefill="kernel")
    backend.settle()
    assert backend.chunks.kernel is not None
    prompt, got = [t % backend.spec.vocab_size for t in prompt_of(130)], []
    for kernel in (None, backend.chunks.kernel):
        backend.memory.cache.zero_()
        with monkeypatch.context() as patch:
            patch.setattr(backend.chunks, "kernel", kernel)
            steps = run(backend, request(0, prompt, 6))[0]
        got.append((steps, held(backend, 0, len(prompt) + 5)))
    assert got[0][0] == got[1][0]
    assert torch.equal(got[0][1], got[1][1])
    backend.close()
