"""Prompts of narrow weights on the GPU: values bit for bit, products with them, and what a prompt leaves."""

import pytest
import torch

from kog_triton.backends import BackendOptions
from tests.lib.cuda_requests import held, prompt_of, request, run
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.narrow_stages import AWQ, CASES, Q4_1
from tests.lib.narrow_stream import NarrowWeights, narrow_spec
from tests.lib.product_cases import SMALL, dealt

pytestmark = pytest.mark.gpu
STAGES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
LARGE = SMALL | {"hidden_size": 1024, "intermediate_size": 2816}
FORMATS = {
    "int4 g128": CASES["int4 g128"][0],
    "int4 zero points": AWQ,
    "int4 minimums": Q4_1,
    "mxfp4": CASES["mxfp4"][0],
    "fp8 blocks": CASES["fp8 blocks"][0],
    "fp8 channels": CASES["fp8 channels"][0],
    "int8 channels": CASES["int8 channels"][0],
}


def weights_of(name, **sizes):
    spec = narrow_spec(FORMATS[name], **(LARGE | sizes))
    return NarrowWeights(spec, ArrayWeights(spec))


class Unpacked:
    """What a checkpoint of 16 bits would have in place of the narrow weights."""

    def __init__(self, narrow):
        self.spec, self.load = narrow.spec.replace(narrow=()), narrow.load


def opened(weights, **options):
    from kog_triton.backends.cuda.backend import CudaBackend

    return CudaBackend(weights, BackendOptions(device="nvidia", max_context=1024, **options))


@pytest.fixture(scope="module", params=FORMATS)
def backend(request):
    """With `source`, its weights."""
    weights = weights_of(request.param)
    backend = opened(weights, prefill="library")
    backend.source = weights
    yield backend
    backend.close()


def test_every_value_that_is_unpacked_is_the_checkpoint_s_rounded_once(backend):
    from kog_triton.backends.cuda.driver import Kernel
    from kog_triton.backends.cuda.jit import compile_cubin
    from kog_triton.backends.cuda.layout.unpack import render_unpack
    from kog_triton.backends.cuda.matrices import ArenaMatrices
    from kog_triton.backends.cuda.unpacking import Unpacking

    lowering, memory = backend.layout.lowering, backend.memory
    stages = [lowering.schedule.stage(name) for name in STAGES]
    kernels = {
        kind: Kernel(
            compile_cubin(render_unpack(kind, backend.spec.dtype), "unpack.cu", backend.gpu.arch),
            "kog_unpack",
            0,
            backend.device,
        )
        for kind in {lowering.weights[name] for name in STAGES}
    }
    unpacking = Unpacking(lowering, memory.weights, memory.biases, kernels.__getitem__, stages)
    unpacked = ArenaMatrices(lowering, memory.weights, torch.bfloat16, unpacking)
    for layer in (1, 0):
        for stage in stages:
            want = dealt(backend.source, stage, layer).bfloat16().view(torch.int16)
            got = unpacked.unpack(layer, stage.name).cpu().view(torch.int16)
            assert torch.equal(got, want), (layer, stage.name)
    for kernel in kernels.values():
        kernel.close()


@pytest.mark.parametrize("tokens", [16, 32, 64, 128, 3072])
def test_every_value_that_is_multiplied_is_the_checkpoint_s_rounded_once(backend, tokens):
    """Tokens that are 1 in one place pick columns, which come out as they are: the first and the last ones, or all."""
    matrices, schedule = backend.library._pass.matrices, backend.layout.lowering.schedule
    for layer in (1, 0):
        for name in STAGES:
            stage = schedule.stage(name)
            want = dealt(backend.source, stage, layer).bfloat16().mT.cuda()
            count = min(tokens, stage.cols)
            for first in {0, stage.cols - count}:
                x = torch.eye(stage.cols, device="cuda").bfloat16()[None, first : first + count]
                got = matrices.product(layer, name, x, None)
                assert torch.equal(got, want[:, first : first + count]), (layer, name, first)


@pytest.mark.parametrize("tokens", [1, 33, 128, 512])
def test_products_are_those_of_the_values_whichever_come_before(backend, tokens):
    """No sum or token of another stage or layer may be read for its own."""
    matrices, schedule = backend.library._pass.matrices, backend.layout.lowering.schedule
    g = torch.Generator("cuda").manual_seed(tokens)
    x = {
        name: torch.randn(1, tokens, schedule.stage(name).cols, device="cuda", generator=g).bfloat16()
        for name in STAGES
    }
    want = {}
    for layer in (0, 1):
        for name in STAGES:
            w = dealt(backend.source, schedule.stage(name), layer).cuda().bfloat16().double()
            exact = torch.bmm(x[name].double(), w.mT)
            torch.cuda.synchronize()
            want[layer, name] = matrices.product(layer, name, x[name], None)
            torch.cuda.synchronize()
            error = (want[layer, name].double() - exact).norm()
            assert error < 4e-3 * exact.norm(), (layer, name)
    for _ in range(20):  # nothing waits between them
        got = {where: matrices.product(*where, x[where[1]], None) for where in want}
        assert all(torch.equal(got[where], want[where]) for where in want)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = {where: matrices.product(*where, x[where[1]], None) for where in want}
    for _ in range(20):
        for value in got.values():
            value.zero_()
        graph.replay()
        assert all(torch.equal(got[where], want[where]) for where in want)


@pytest.mark.parametrize("tokens", [40, 600])
@pytest.mark.parametrize("name", ["int4 g128", "fp8 blocks"])
def test_a_prompt_leaves_what_that_of_the_unpacked_weights_leaves(name, tokens):
    weights, left = weights_of(name, vocab_size=128), []
    for source in (weights, Unpacked(weights)):
        ours = opened(source, prefill="library")
        assert run(ours, request(0, prompt_of(tokens), 2))
        left.append(held(ours, 0, tokens).cpu())
        ours.close()
    narrow, wide = (of.double() for of in left)
    assert wide.norm() > 0
    assert (narrow - wide).norm() < 5e-3 * wide.norm()  # their sums run over K in other orders
