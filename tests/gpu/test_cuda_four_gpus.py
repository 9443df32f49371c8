"""The CUDA kernel and its backend on four GPUs and on eight, each set where there are as many: logits, sampled tokens,
columns, chunks, passes of prompts, random delays, and a rank that is never launched."""

import re

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.gpus import check_peers
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError, RunError
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_rank_columns import alone_on_ranks, assert_same
from tests.lib.cuda_requests import error_of, request, run, serve, tokens_of
from tests.lib.cuda_sampling import SETTINGS, assert_sampled, resolved
from tests.lib.gpu_ranks import GpuRankColumns, GpuRanks
from tests.lib.machine_code import spec_named
from tests.lib.ring_walker import spec_of

pytestmark = pytest.mark.gpu
# KV heads are replicated on four GPUs and on eight.
SMALL = spec_of(dtype=DType.F16, num_heads=8, num_kv_heads=2, vocab_size=104, max_context=512)
SPECS = {  # positions compared, most that logits may be off
    "fp16": (SMALL, 200, 0.03),
    "laneformer-2b": (spec_named("laneformer-2b"), 60, 0.1),
    "llama-3.2-1b": (named_shape("llama-3.2-1b"), 80, 0.45),
    "fp8 blocks": (with_format(named_shape("llama-3.2-1b"), FORMATS["fp8-block"]), 80, 0.45),
}
GREEDY = SamplingParams(temperature=0)
TOLD = SamplingParams(temperature=1.0, logprobs=2, seed=3)
COUNT = 40


@pytest.fixture(scope="module", params=[4, 8], ids=["four GPUs", "eight GPUs"])
def devices(request):
    try:
        check_peers(request.param)
    except DeviceError as error:
        pytest.skip(str(error))
    return [torch.device("cuda", i) for i in range(request.param)]


@pytest.fixture(scope="module")
def small(devices):
    made = GpuRanks(SMALL, RandomWeights(SMALL, device="cuda"), devices)
    yield made
    made.close()


def opened(devices, spec, prefill="auto", num_slots=4):
    asked = BackendOptions(num_slots, 1024, num_gpus=len(devices), device="nvidia", prefill=prefill)
    return CudaBackend(RandomWeights(spec, device="cuda"), asked)


@pytest.fixture(scope="module")
def backend(devices):
    made = opened(devices, named_shape("qwen3-0.6b"))
    made.settle()
    yield made
    made.close()


def prompt_of(spec, count, seed=0):
    return np.random.default_rng(seed).integers(0, spec.vocab_size, count).tolist()


@pytest.mark.parametrize("name", SPECS)
def test_logits_agree_with_the_reference_and_repeat(name, devices):
    spec, count, limit = SPECS[name]
    weights = (NarrowRandomWeights if spec.narrow else RandomWeights)(spec, device="cuda")
    tokens = prompt_of(spec, count)
    ours = GpuRanks(spec, weights, devices)
    got = ours.forward_logits(tokens)
    for seed in (1, 2, 3):
        assert np.array_equal(got, ours.forward_logits(tokens, seed))
    options = BackendOptions(device="nvidia", num_gpus=1 if spec.num_lanes > 1 else len(devices))
    expected = ReferenceBackend(weights, options).forward_logits(tokens)
    assert expected.std() > 1
    assert np.sqrt(((got - expected) ** 2).mean()) < limit
    ours.close()


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "penalties", "all at once"])
def test_sampled_tokens_are_the_definitions(small, name):
    params = resolved(SMALL.vocab_size, **SETTINGS[name])
    assert assert_sampled(small, [1, 2, 3, 2], 12, params) in (1, 2)


def test_a_thousand_requests_with_random_delays_between_launches(small):
    expected = small.generate([5, 17, 60], 8, GREEDY)
    assert expected[1] == 2
    for seed in range(1, 1001):
        assert small.generate([5, 17, 60], 8, GREEDY, seed=seed) == expected, small.reports()


def test_all_ranks_leave_when_one_is_never_launched(small, devices):
    for absent in range(len(devices)):
        took = small.run(small.words([1, 2], 40), [1, 2], limit=50_000_000, absent=absent)
        assert 50e6 < took < 500e6
        # One rank at least waited until its own limit and told the others, whose waits may have expired, too, or not.
        waited = {rank: at for rank, at in small.expired().items() if rank != absent}
        assert waited
        for layer, place in waited.values():
            assert layer == 0 and "attention_out_now" in place
        assert small.generate([1, 2], 2)[1] == 2  # and the next request runs


@pytest.mark.parametrize("columns", [2, 8])
def test_requests_that_share_a_step_leave_what_each_leaves_alone(columns, small, devices):
    params = {1: TOLD, 2: SamplingParams(temperature=2.0, seed=7)}
    requests = [request(i, prompt_of(SMALL, 4 + 9 * i, i), COUNT, params.get(i, GREEDY)) for i in range(columns)]
    expected = alone_on_ranks(small, requests)
    ours = GpuRankColumns(SMALL, RandomWeights(SMALL, device="cuda"), devices, columns)
    for seed in range(5):
        assert_same(ours.serve(requests, seed), expected)
    ours.close()


def test_a_prompt_in_chunks_leaves_what_it_leaves_a_token_at_a_time(small, devices):
    ours = GpuRankColumns(SMALL, RandomWeights(SMALL, device="cuda"), devices, 8, chunk=True)
    for length in (9, 16, 200):
        asked = [request(0, prompt_of(SMALL, length), 1, TOLD)]
        for seed in range(3):
            ours.most_steps = dict.fromkeys(range(len(devices)), 1 + 7 * seed)
            assert_same(ours.serve(asked, seed), alone_on_ranks(small, asked))
    ours.close()


LENGTHS = (9, 60, 300, 700)  # a pass of short prompts, and the library's
# Of log-probabilities; of other streams they differ by units (benchmarks/cuda-log.md#rank-passes).
ROUNDING = 2.0


def test_prompts_of_every_way_say_what_the_kernels_own_prompt_says_nearly(backend, devices):
    own = opened(devices, backend.spec, "kernel")
    own.settle()
    told = SamplingParams(temperature=0, logprobs=5)
    for slot, length in enumerate(LENGTHS):
        asked = request(slot, prompt_of(backend.spec, length, slot), 4, told)
        mine, theirs = run(backend, asked)[slot], dict(run(own, asked)[slot][0].top)
        common = [abs(p - theirs[token]) for token, p in mine[0].top if token in theirs]
        assert len(common) >= 3 and max(common) < ROUNDING
    own.close()


def test_requests_beside_each_other_say_what_each_says_alone(backend):
    asked = [request(slot, prompt_of(backend.spec, length, slot), COUNT) for slot, length in enumerate(LENGTHS)]
    alone = {r.slot: tokens_of(run(backend, r)[r.slot]) for r in asked}
    for _ in range(50):
        steps = run(backend, *asked)
        assert {slot: tokens_of(steps[slot]) for slot in alone} == alone


def test_a_rank_that_is_never_launched_is_named(backend, devices, monkeypatch):
    def refuse(*arguments):
        raise DeviceError("it does not start")

    asked = request(0, (1, 2), 8)
    expected = tokens_of(serve(backend, asked)[0])
    for absent in (0, len(devices) - 1):
        kernel = backend.kernel._kernels[absent]
        with monkeypatch.context() as patched:
            patched.setattr(backend, "wait_ns", 50_000_000)
            patched.setattr(kernel, "launch", refuse)
            patched.setattr(kernel, "queued", refuse)
            error = error_of(serve(backend, asked)[0])
        assert isinstance(error, RunError)
        assert re.search(rf"the kernel of rank {absent} was not launched: it does not", str(error))
        assert tokens_of(serve(backend, asked)[0]) == expected
