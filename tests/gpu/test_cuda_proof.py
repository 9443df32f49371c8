"""What the CUDA monokernel withstands on a Hopper GPU: faults that are planted, delays, a long day's work.

The faults and what is asked of them are cuda_injection.py's; after each the same GPU serves a request.
"""

import time

import numpy as np
import pytest

from kog_triton import LLM, SamplingParams
from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import toolchain
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.random_weights import RandomWeights
from tests.lib.cuda_injection import (
    EDITS,
    MODELS,
    SPECS,
    Weights,
    assert_delays_change_nothing,
    assert_logits_agree,
    assert_nan_is_never_lost,
    assert_patterns_travel,
    assert_silence_is_named,
    selecting,
)
from tests.lib.cuda_planting import plant
from tests.lib.cuda_walk import ROOT
from tests.lib.process_memory import gpu_memory, host_bytes, leaked

pytestmark = pytest.mark.gpu
DEMO = ROOT / "kog_triton/demo/checkpoint"
REQUESTS, PROMPTS, TOKENS = 10_000, 50, 8
RUNS, SEEDS = 100, 20


def opened(weights, num_blocks=0):
    return CudaBackend(weights, BackendOptions(device="nvidia"), num_blocks)


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return SPECS[request.param]


# What decodes for long: name -> weights and blocks, 0 for as many as there are.
LONG = {
    "demo": lambda: (Checkpoint.open(DEMO), 0),  # float16
    "bf16": lambda: (RandomWeights(SPECS["bf16"], device="cuda"), 4),
}


@pytest.fixture(scope="module", params=LONG)
def faulty(request, tmp_path_factory):
    """A model of LONG on the kernel of EDITS."""
    include = plant(tmp_path_factory.mktemp("faulty"), *EDITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toolchain, "INCLUDE", include)
        # Prompts of three tokens would go to a kernel that is compiled beside, without the edits.
        patch.setattr(CudaBackend, "chunk_positions", 0)
        backend = opened(*LONG[request.param]())
    backend.wait_ns = 1 << 24  # 17 ms
    yield backend
    backend.close()


def test_a_silent_block_is_named_and_the_gpu_goes_on(faulty):
    assert_silence_is_named(faulty)


def seconds(backend):
    begun = time.perf_counter()
    backend.forward_logits(list(range(3, 60)))
    return time.perf_counter() - begun


def test_delays_change_nothing(faulty):
    faulty.wait_ns = 1 << 31  # two seconds
    assert_delays_change_nothing(faulty, range(1, SEEDS + 1))
    faulty.wait_ns = 1 << 24


@pytest.mark.parametrize("faulty", ["demo"], indirect=True)
def test_delays_there_are(faulty):
    faulty.wait_ns = 1 << 31
    swift = min(seconds(faulty) for _ in range(3))
    faulty.wait_ns += 1
    assert min(seconds(faulty) for _ in range(3)) > 2 * swift
    faulty.wait_ns = 1 << 24


def test_nan_is_never_lost(spec):
    backend = opened(RandomWeights(spec, device="cuda"), 2)
    ring_slots = backend.memory.weights.numel() // backend.layout.lowering.ring_slot_bytes
    assert_nan_is_never_lost(backend, range(ring_slots))
    backend.close()


@pytest.mark.parametrize("name", MODELS)
def test_values_that_look_like_tags_are_values(name, spec):
    weights = Weights(spec, MODELS[name], "cuda")
    backend = opened(weights)
    assert_logits_agree(backend, weights)
    backend.close()


def test_every_pattern_travels(spec):
    backend = opened(Weights(spec, selecting, "cuda"))
    assert_patterns_travel(backend, 1)
    backend.close()


@pytest.mark.parametrize("name", LONG)
def test_a_hundred_runs_are_equal(name):
    backend = opened(*LONG[name]())
    ids = np.random.default_rng(0).integers(0, backend.spec.vocab_size, 40).tolist()
    first = backend.forward_logits(ids)
    assert first.std() > 1
    for _ in range(RUNS - 1):
        assert np.array_equal(backend.forward_logits(ids), first)
    backend.close()


def test_ten_thousand_requests_are_answered_alike_and_leave_nothing_behind():
    """Prompts in turn, half of them sampled; every answer is the one that its prompt had the first time.

    Prompts in the kernel: logits of two prefills differ by enough to swap two tokens that are level.
    """
    rng = np.random.default_rng(1)
    with LLM(DEMO, backend=CudaBackend, max_model_len=64, prefill="kernel") as llm:
        llm.engine.backend.settle()
        vocab = llm.engine.backend.spec.vocab_size
        prompts = [{"prompt_token_ids": rng.integers(0, vocab, 1 + i % 7).tolist()} for i in range(PROMPTS)]
        params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=TOKENS, ignore_eos=True) for i in range(PROMPTS)]

        def ask(i):
            return llm.generate([prompts[i]], params[i])[0].outputs[0]

        first = [ask(i) for i in range(PROMPTS)]
        assert len({tuple(out.token_ids) for out in first}) > PROMPTS // 2
        for prompt, out in zip(prompts[::2], first[::2], strict=True):
            logits = llm.forward_logits([*prompt["prompt_token_ids"], *out.token_ids])
            best = logits[len(prompt["prompt_token_ids"]) - 1 : -1].argmax(1)
            assert best.tolist() == list(out.token_ids)

        def held():
            with llm.engine.paused():  # a request's last word comes before its launch is put away
                return gpu_memory(), host_bytes()

        gpu, host = {}, 0
        for n in range(REQUESTS):
            i = n % PROMPTS
            out = ask(i)
            assert (out.token_ids, out.text) == (first[i].token_ids, first[i].text)
            if n == REQUESTS // 10:  # allocators have settled
                gpu, host = held()
        gpu_then, host_then = held()
        assert leaked(gpu, gpu_then, REQUESTS * 9 // 10) == []
        assert host_then - host < 4 << 20
