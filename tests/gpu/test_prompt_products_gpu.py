"""Products of prompts on the GPU: the arena's matrices times tokens, against float64 products of the weights."""

import pytest
import torch

from tests.lib.product_cases import SPECS, dealt

pytestmark = pytest.mark.gpu

TOKENS = (1, 15, 16, 17, 33, 64, 100, 128, 129, 300, 512, 1000)


@pytest.fixture(scope="module", params=[(n, f16) for n in SPECS for f16 in (False, True)], ids=str)
def products(request):
    from kog_triton.backends.cuda.driver import Kernel
    from kog_triton.backends.cuda.jit import compile_cubin
    from kog_triton.backends.cuda.layout.prompt import render_product
    from kog_triton.backends.cuda.memory import pack_arena
    from kog_triton.backends.cuda.products import ArenaProducts
    from kog_triton.checkpoint.random_weights import RandomWeights
    from kog_triton.model.spec import DType
    from kog_triton.schedule.cuda import lower
    from kog_triton.schedule.schedule import build
    from kog_triton.schedule.topology import find_gpu

    name, f16 = request.param
    spec = SPECS[name].replace(dtype=DType.F16 if f16 else DType.BF16)
    dtype = torch.float16 if f16 else torch.bfloat16
    device, weights, schedule = torch.device("cuda"), RandomWeights(spec), build(spec)
    lowering = lower(schedule, find_gpu("h200"))
    arena = pack_arena(lowering, lambda n: weights.load(n).to(device), weights.load("embed").to(device, dtype))
    kernels = []

    def load(kernel, entry, shared):
        cubin = compile_cubin(render_product(kernel, spec.dtype), "prompt.cu")
        kernels.append(Kernel(cubin, entry, shared, device))
        return kernels[-1]

    yield schedule, weights, ArenaProducts(lowering, arena, dtype, load, torch.zeros(0)), dtype
    torch.cuda.synchronize()
    for kernel in kernels:
        kernel.close()


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("stage", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
def test_products_are_those_of_the_weights_and_the_same_every_time(products, stage, tokens):
    schedule, weights, ours, dtype = products
    found, layer = schedule.stage(stage), 1
    w = dealt(weights, found, layer).to("cuda", dtype).double()
    torch.manual_seed(tokens)
    x = torch.randn(schedule.num_shards, tokens, found.cols, device="cuda").to(dtype)
    bias = torch.randn(schedule.num_shards, found.rows, device="cuda").to(dtype)
    want = torch.bmm(x.double(), w.mT)
    got = [ours.product(layer, stage, x, None) for _ in range(4)]
    assert all(torch.equal(got[0], again) for again in got)
    assert (got[0].double() - want).norm() < 4e-3 * want.norm()
    biased = ours.product(layer, stage, x, bias)
    assert (biased.double() - want - bias[:, None]).norm() < 6e-3 * want.norm()
    # a token's product is its own: others beside it change nothing of what tiles alike
    other = x.clone()
    other[:, 1:] = torch.nan
    assert torch.equal(ours.product(layer, stage, other, None)[:, :1], got[0][:, :1])


def test_a_captured_product_is_the_same(products):
    schedule, _, ours, dtype = products
    x = torch.randn(schedule.num_shards, 40, schedule.stage("qkv_proj").cols, device="cuda").to(dtype)
    want = ours.product(0, "qkv_proj", x, None)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = ours.product(0, "qkv_proj", x, None)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
