"""Requests on ranks of the CUDA backend: on one GPU, half of its SMs a rank, and on two GPUs, a launch each."""

import re
import time

import numpy as np
import pytest
import torch

from kog_triton import LLM
from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.bench.check import MAX_GAP, token_gaps
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.demo import checkpoint_path
from kog_triton.errors import DeviceError, RunError
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import (
    PROMPTS,
    assert_cancelled_slot_goes_on,
    ended,
    error_of,
    interrupt,
    request,
    run,
    serve,
    tokens_of,
)
from tests.lib.gpu_ranks import SharedBackend
from tests.lib.ring_walker import spec_of
from tests.lib.two_gpus import skip_without_two

pytestmark = pytest.mark.gpu
SMALL = spec_of(dtype=DType.F16, vocab_size=100, max_context=512)
COUNT = 60


@pytest.fixture(scope="module", params=["one GPU", "two GPUs"])
def kind(request):
    if request.param == "one GPU":
        return SharedBackend
    skip_without_two()
    return CudaBackend


def opened(kind, weights, max_context=512, num_slots=1):
    asked = BackendOptions(num_slots, max_context, num_gpus=2, device="nvidia")
    return kind(weights, asked)


@pytest.fixture(scope="module")
def small(kind):
    """With its kernels of columns and of chunks."""
    made = opened(kind, RandomWeights(SMALL, device="cuda"), num_slots=3)
    for count in made.columns.counts:
        made.columns.ready(count)  # begins to compile
    made.settle()
    assert made.chunks.kernel is not None
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(small):
    """Tokens on the kernel of one token, all of the prompt included."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(small.chunks, "kernel", None)
        return {p: tokens_of(run(small, request(0, p, COUNT))[0]) for p in PROMPTS[:3]}


@pytest.mark.parametrize("name", ["demo", "llama-3.2-1b"])
def test_tokens_are_the_references_but_for_near_ties(kind, name):
    """Lanes whose late sums cross GPUs, and plain tensor parallelism; as near as `kog bench` asks."""
    if name == "demo":
        weights, ranks = Checkpoint.open(checkpoint_path()), 1
    else:
        weights, ranks = RandomWeights(named_shape(name), device="cuda"), 2
    ours = opened(kind, weights)
    prompt = np.random.default_rng(0).integers(0, ours.spec.vocab_size, 32).tolist()
    tokens = tokens_of(serve(ours, request(0, prompt, 100))[0])
    own = ours.forward_logits(prompt + tokens)[len(prompt) - 1 : -1]
    assert tokens == own.argmax(1).tolist() and len(tokens) == 100
    reference = ReferenceBackend(weights, BackendOptions(device="nvidia", num_gpus=ranks))
    theirs = reference.forward_logits(prompt + tokens)[len(prompt) - 1 : -1]
    gaps = token_gaps(theirs, tokens)
    assert gaps.max() < MAX_GAP and (gaps == 0).mean() > 0.8
    ours.close()
    reference.close()


def test_requests_share_steps_and_say_what_each_says_alone(small, alone):
    steps = run(small, *(request(slot, p, COUNT) for slot, p in enumerate(PROMPTS[:3])))
    assert {p: tokens_of(steps[slot]) for slot, p in enumerate(PROMPTS[:3])} == alone
    assert small.columns.kernels


def test_requests_of_several_slots_take_turns_without_a_kernel_of_columns(small, alone, monkeypatch):
    monkeypatch.setattr(small.columns, "ready", lambda requests: False)
    steps = run(small, *(request(slot, p, COUNT) for slot, p in enumerate(PROMPTS[:3])))
    assert {p: tokens_of(steps[slot]) for slot, p in enumerate(PROMPTS[:3])} == alone


def test_a_thousand_times_three_requests_share_steps_and_say_the_same(small, alone):
    asked = [request(slot, p, 8) for slot, p in enumerate(PROMPTS[:3])]
    for _ in range(1000):
        steps = serve(small, *asked)
        assert [tokens_of(steps[r.slot]) for r in asked] == [alone[r.prompt][:8] for r in asked]


def test_a_yield_returns_at_a_token_boundary_and_resumes(small, alone, monkeypatch):
    server = interrupt(small, monkeypatch, Mailbox.yield_now, request(0, PROMPTS[0], COUNT))
    assert not ended(server.finish()[0])
    small.forward_logits([1, 2, 3])
    server.mailbox.resume()
    server.start()
    assert tokens_of(server.finish()[0]) == alone[PROMPTS[0]]


def test_a_cancel_ends_a_request_and_its_slot_keeps_what_it_computed(small):
    assert_cancelled_slot_goes_on(small, 450)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_never_launched_is_named_and_the_next_request_runs(small, alone, monkeypatch, rank):
    def refuse(*arguments):
        raise DeviceError("it does not start")

    kernel = small.kernel._kernels[rank]
    with monkeypatch.context() as patched:
        patched.setattr(small, "wait_ns", 50_000_000)
        patched.setattr(kernel, "launch", refuse)
        patched.setattr(kernel, "queued", refuse)
        begun = time.monotonic()
        error = error_of(serve(small, request(0, PROMPTS[1]))[0])  # too short for a chunk
        assert 0.05 < time.monotonic() - begun < 1
    assert isinstance(error, RunError)
    assert re.fullmatch(
        rf"a wait of the kernel expired: rank {1 - rank}, block \d+, layer 0, attention_out, word \d+ of "
        rf"attention_out_now, seen 0, wanted 1, after 0 steps; the kernel of rank {rank} was not launched: it does not "
        "start",
        str(error),
    )
    assert tokens_of(serve(small, request(0, PROMPTS[0], COUNT))[0]) == alone[PROMPTS[0]]


def test_a_thousand_requests_end_and_say_the_same(small, alone):
    for _ in range(1000):
        assert tokens_of(serve(small, request(0, PROMPTS[1], 8))[0]) == alone[PROMPTS[1]][:8]


def test_an_llm_on_two_gpus_streams_and_continues_a_conversation():
    skip_without_two()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(backend="cuda", tensor_parallel_size=2, max_model_len=512) as llm:
        assert llm.engine.backend.num_devices == 2
        (first,) = llm.generate("def add(a, b):", params)
        deltas = list(llm.stream("def add(a, b):", params))
        assert "".join(d.text for d in deltas) == first.outputs[0].text
        more = [*first.prompt_token_ids, *first.outputs[0].token_ids, 7]
        (second,) = llm.generate({"prompt_token_ids": more}, params)
        assert second.metrics.cached_tokens >= len(more) - 3
    with LLM(backend="cuda", tensor_parallel_size=2, max_model_len=512) as cold:
        (fresh,) = cold.generate({"prompt_token_ids": more}, params)
    assert fresh.outputs[0].token_ids == second.outputs[0].token_ids


def test_both_gpus_are_given_back():
    skip_without_two()
    free = [torch.cuda.mem_get_info(i)[0] for i in range(2)]
    spec = named_shape("llama-3.2-1b")
    made = opened(CudaBackend, RandomWeights(spec, device="cuda"))
    held = [free[i] - torch.cuda.mem_get_info(i)[0] for i in range(2)]
    made.close()
    left = [free[i] - torch.cuda.mem_get_info(i)[0] for i in range(2)]
    assert all(h > 1 << 30 for h in held) and all(n < 1 << 29 for n in left)
