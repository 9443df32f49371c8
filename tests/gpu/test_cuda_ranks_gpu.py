"""The CUDA kernel on two ranks as machine code: on one GPU, half of its SMs each, and on two that reach each other."""

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import DType, Head
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_rank_columns import alone_on_ranks, assert_same, left_by
from tests.lib.cuda_requests import request
from tests.lib.cuda_sampling import SETTINGS, assert_sampled, resolved
from tests.lib.gpu_ranks import GpuRankColumns, GpuRanks
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.machine_code import spec_named
from tests.lib.ring_walker import spec_of
from tests.lib.two_gpus import skip_without_two

pytestmark = pytest.mark.gpu
SMALL = spec_of(dtype=DType.F16, vocab_size=100, max_context=512)
SPECS = {  # positions compared, most that logits may be off
    "fp16": (SMALL, 200, 0.03),
    "bf16, biases": (spec_of(vocab_size=100, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True), 60, 0.15),
    "lanes, sum": (mixed_lanes(Head.SUM_THEN_NORM, max_context=512), 200, 0.04),
    "lanes, vocab parallel": (mixed_lanes(Head.VOCAB_PARALLEL, max_context=512), 200, 0.04),
    "llama-3.2-1b": (named_shape("llama-3.2-1b"), 80, 0.45),
    "fp8 blocks": (with_format(named_shape("llama-3.2-1b"), FORMATS["fp8-block"]), 80, 0.45),
    "int4": (with_format(named_shape("llama-3.2-1b"), FORMATS["int4-g128"]), 80, 0.45),
    "int8 channels": (with_format(SMALL, FORMATS["int8-channel"]), 60, 0.05),
}


def weights_of(spec):
    kind = NarrowRandomWeights if spec.narrow else RandomWeights
    return kind(spec, device="cuda")


@pytest.fixture(scope="module", params=["one GPU", "two GPUs"])
def devices(request):
    if request.param == "one GPU":
        return [torch.device("cuda", 0)] * 2
    skip_without_two()
    return [torch.device("cuda", i) for i in range(2)]


@pytest.mark.parametrize("name", SPECS)
def test_logits_agree_with_the_reference_and_repeat(name, devices):
    spec, count, limit = SPECS[name]
    weights = weights_of(spec)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, count).tolist()
    ours = GpuRanks(spec, weights, devices, min(spec.max_context, 512))
    got = ours.forward_logits(tokens)
    for seed in (1, 2):
        assert np.array_equal(got, ours.forward_logits(tokens, seed))
    options = BackendOptions(device="nvidia", num_gpus=1 if spec.num_lanes > 1 else 2)
    expected = ReferenceBackend(weights, options).forward_logits(tokens)
    assert expected.std() > 4
    assert np.sqrt(((got - expected) ** 2).mean()) < limit
    ours.close()


@pytest.fixture(scope="module")
def small(devices):
    made = GpuRanks(SMALL, RandomWeights(SMALL, device="cuda"), devices)
    yield made
    made.close()


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "penalties", "all at once"])
def test_sampled_tokens_are_the_definitions(small, name):
    params = resolved(SMALL.vocab_size, **SETTINGS[name])
    assert assert_sampled(small, [1, 2, 3, 2], 12, params) in (1, 2)


def test_a_thousand_requests_with_random_delays_between_launches(small):
    greedy = SamplingParams(temperature=0)
    expected = small.generate([5, 17, 60], 8, greedy)
    assert expected[1] == 2
    for seed in range(1, 1001):
        assert small.generate([5, 17, 60], 8, greedy, seed=seed) == expected, small.reports()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_leave_when_one_is_never_launched(small, rank):
    took = small.run(small.words([1, 2], 40), [1, 2], limit=50_000_000, absent=rank)
    assert 50e6 < took < 500e6
    layer, place = small.expired()[1 - rank]
    assert layer == 0 and "attention_out_now" in place
    assert small.generate([1, 2], 2)[1] == 2  # and the next request runs


@pytest.mark.parametrize("name", ["llama-3.2-1b", "laneformer-2b"])
def test_tokens_are_stamped_as_they_come(name, devices):
    """With -s it also prints the rate; on one GPU a rank has half of its SMs and of its bandwidth."""
    spec = spec_named(name)
    ours = GpuRanks(spec, RandomWeights(spec, device="cuda"), devices)
    prompt = np.random.default_rng(0).integers(0, spec.vocab_size, 32).tolist()
    tokens, outcome = ours.generate(prompt, 256)
    steps = ours.step_ns()
    assert outcome == 2 and len(tokens) == 256 and len(steps) == 255 and (steps > 0).all()
    p50, p99 = np.percentile(steps, (50, 99)) / 1e3
    print(f"{name}, 2 ranks: {1e9 / steps.mean():.0f} tokens/s, p50 {p50:.0f} us, p99 {p99:.0f} us")
    ours.close()


# ---- several requests a step, and prompts in chunks ----

TOLD = SamplingParams(temperature=1.0, logprobs=2, seed=3)
COLUMN_SPECS = {name: SPECS[name][0] for name in ("fp16", "lanes, sum", "lanes, vocab parallel", "int8 channels")}


def prompt_of(spec, count, seed=0):
    return np.random.default_rng(seed).integers(0, spec.vocab_size, count).tolist()


def mixed_requests(spec, columns, count):
    """Prompts of several lengths, of which one is told its log-probabilities, and one is drawn."""
    params = {1: TOLD, 2: SamplingParams(temperature=2.0, seed=7)}
    greedy = SamplingParams(temperature=0)
    return [request(i, prompt_of(spec, 4 + 9 * i, i), count, params.get(i, greedy)) for i in range(columns)]


@pytest.mark.parametrize("columns", [2, 8])
@pytest.mark.parametrize("name", COLUMN_SPECS)
def test_requests_that_share_a_step_leave_what_each_leaves_alone(name, columns, devices):
    spec = COLUMN_SPECS[name]
    weights, requests = weights_of(spec), mixed_requests(spec, columns, 40)
    one = GpuRanks(spec, weights, devices)
    expected = alone_on_ranks(one, requests)
    ours = GpuRankColumns(spec, weights, devices, columns)
    for seed in range(3):
        assert_same(ours.serve(requests, seed), expected)
    one.close(), ours.close()


@pytest.mark.parametrize("name", COLUMN_SPECS)
def test_a_prompt_in_chunks_leaves_what_it_leaves_a_token_at_a_time(name, devices):
    spec = COLUMN_SPECS[name]
    weights = weights_of(spec)
    one = GpuRanks(spec, weights, devices)
    ours = GpuRankColumns(spec, weights, devices, 8, chunk=True)
    for length in (9, 16, 200):
        asked = [request(0, prompt_of(spec, length), 1, TOLD)]
        for seed in range(3):
            ours.most_steps = dict.fromkeys(range(2), 1 + 7 * seed)
            assert_same(ours.serve(asked, seed), alone_on_ranks(one, asked))
    one.close(), ours.close()


def test_columns_again_and_again_with_random_delays_between_launches(devices):
    spec = SPECS["lanes, sum"][0]
    ours = GpuRankColumns(spec, RandomWeights(spec, device="cuda"), devices, 4)
    requests = mixed_requests(spec, 4, 12)
    expected = ours.serve(requests)
    for seed in range(1, 251):
        assert_same(ours.serve(requests, seed), expected)
    ours.close()


@pytest.mark.parametrize("chunk", [False, True], ids=["requests", "a chunk"])
def test_ranks_of_columns_leave_when_one_is_never_launched(chunk, devices):
    ours = GpuRankColumns(SMALL, RandomWeights(SMALL, device="cuda"), devices, 8, chunk)
    requests = [request(0, prompt_of(SMALL, 90), 1)] if chunk else mixed_requests(SMALL, 8, 4)
    slots = [r.slot for r in requests]
    for rank in (0, 1):
        ours.write(requests)
        assert 50e6 < ours.launch(slots, limit=50_000_000, absent=rank) < 500e6
        layer, place = ours.expired()[1 - rank]
        assert layer == 0 and "attention_out_sent" in place
        assert ours.serve(requests)[0][0]  # and the next launch runs
    ours.close()


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.2-1b", "laneformer-2b"])
def test_tokens_of_eight_requests_are_stamped_as_they_come(name, devices):
    """With -s it also prints the rates of one rank and of two; on one GPU a rank of two has half of its SMs."""
    spec, rates = spec_named(name), {}
    weights = RandomWeights(spec, device="cuda")
    requests = [request(i, prompt_of(spec, 32, i), 256) for i in range(8)]
    for ranks in (1, 2):
        ours = GpuRankColumns(spec, weights, devices[:ranks], 8)
        said = ours.serve(requests)
        steps = np.concatenate([ours.step_ns(slot) for slot in range(8)])
        assert all(len(tokens) == 256 for tokens, _, _ in said.values()) and (steps > 0).all()
        rates[ranks] = 8e9 / steps.mean()
        ours.close()
        del ours, said
        torch.cuda.empty_cache()
    print(f"{name}, 8 requests: {rates[1]:.0f} and {rates[2]:.0f} tokens/s, {rates[2] / rates[1]:.2f}x")


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.2-1b", "laneformer-2b"])
def test_a_prompt_in_chunks_is_timed(name, devices):
    """With -s it also prints the time of a prompt of 256 tokens, launch and end of launch included."""
    spec, took = spec_named(name), {}
    weights, asked = RandomWeights(spec, device="cuda"), [request(0, prompt_of(spec, 256), 1)]
    for ranks in (1, 2):
        ours = GpuRankColumns(spec, weights, devices[:ranks], 8, chunk=True)
        times = []
        for _ in range(5):
            ours.write(asked)
            times.append(ours.launch([0]))
            assert len(left_by(ours, 0)[0]) == 1
        took[ranks] = min(times) / 1e6
        ours.close()
        del ours
        torch.cuda.empty_cache()
    print(f"{name}, 256 tokens in chunks: {took[1]:.2f} and {took[2]:.2f} ms")
