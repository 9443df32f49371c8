"""The CUDA monokernel on a Hopper GPU: against the reference, against itself, and through the mailbox."""

import threading

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import launcher
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.mailbox import Failure, Mailbox, Request
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import RunError
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.sampling import History, SamplingParams, sample
from tests.lib.cuda_requests import PROMPTS, Server, assert_alone, held, request, run, tokens_of
from tests.lib.cuda_walk import ROOT
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.ring_walker import spec_of

pytestmark = pytest.mark.gpu
NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED


# name -> spec, positions compared, root mean square error allowed on logits that deviate by 4 or more
SPECS = {
    "bf16": (spec_of(max_context=512), 200, 0.15),
    "fp16": (spec_of(dtype=DType.F16, max_context=512), 200, 0.03),
    "biases, norms, tied": (
        spec_of(
            dtype=DType.F16, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True,
            tied_embeddings=True, max_context=512,
        ),
        100,
        0.03,
    ),
    "windows": (spec_of(dtype=DType.F16, windows=(5, 0, 90), max_context=512), 300, 0.03),
    "one key head, head_dim 24": (
        spec_of(
            dtype=DType.F16, hidden_size=200, num_heads=10, num_kv_heads=1, head_dim=24,
            max_context=2048,
        ),
        1200,
        0.03,
    ),
    "mean": (mixed_lanes(Head.MEAN, max_context=512), 200, 0.04),
    "concat": (mixed_lanes(Head.CONCAT, max_context=512), 200, 0.04),
    "sum": (mixed_lanes(Head.SUM_THEN_NORM, max_context=512), 200, 0.04),
    "vocab parallel": (mixed_lanes(Head.VOCAB_PARALLEL, max_context=512), 200, 0.04),
    # The reference rounds to bf16 as often as we do: 0.33 on an H200.
    "llama-3.2-1b": (named_shape("llama-3.2-1b"), 80, 0.45),
}  # fmt: skip


def options(max_context=0, num_slots=1):
    return BackendOptions(device="nvidia", max_context=max_context, num_slots=num_slots)


def ids_of(spec, count, seed=0):
    return np.random.default_rng(seed).integers(0, spec.vocab_size, count).tolist()


@pytest.mark.parametrize("name", SPECS)
def test_logits_agree_with_the_reference_and_repeat(name):
    spec, count, limit = SPECS[name]
    weights = RandomWeights(spec, device="cuda")
    tokens = ids_of(spec, count)
    ours = CudaBackend(weights, options(min(spec.max_context, 2048)))
    got = ours.forward_logits(tokens)
    assert np.array_equal(got, ours.forward_logits(tokens))
    expected = ReferenceBackend(weights, options()).forward_logits(tokens)
    assert expected.std() > 4
    assert np.sqrt(((got - expected) ** 2).mean()) < limit
    ours.close()


@pytest.fixture(scope="module")
def demo():
    weights = Checkpoint.open(ROOT / "kog_triton/demo/checkpoint")
    ours = CudaBackend(weights, options(num_slots=3))
    ours.settle()
    return ours, ReferenceBackend(weights, options())


def generate(backend, prompt, count, params):
    """Steps of one request."""
    mailbox = Mailbox()
    mailbox.post(Request(0, tuple(prompt), params, params.seed or 0, count))
    server = threading.Thread(target=backend.generate, args=(mailbox,))
    server.start()
    steps = []
    while not steps or not (isinstance(steps[-1], Failure) or steps[-1].finish):
        steps += mailbox.read(0, 30)
    server.join()
    if isinstance(steps[-1], Failure):
        raise steps[-1].error
    return steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_definitions_on_the_kernels_logits(demo, temperature):
    ours, _ = demo
    prompt = ids_of(ours.spec, 8)
    params = SamplingParams(temperature=temperature, seed=(5 << 33) + 77)
    steps = generate(ours, prompt, 40, params)
    out = prompt + [s.token for s in steps]
    logits = ours.forward_logits(out[:-1])
    for n in range(len(prompt), len(out)):
        assert sample(logits[n - 1], params, History(tuple(prompt)), n).token == out[n]
    assert steps[-1].finish == "length" and len(steps) == 40


def test_greedy_tokens_agree_with_the_reference(demo):
    ours, reference = demo
    prompt, params = ids_of(ours.spec, 8), SamplingParams(temperature=0)
    steps = generate(ours, prompt, 100, params)
    expected = generate(reference, prompt, 100, params)
    logits = reference.forward_logits(prompt + [s.token for s in expected])
    for n, (a, b) in enumerate(zip(steps, expected, strict=True)):
        if a.token != b.token:  # the first may differ only where the reference is nearly tied
            top = np.sort(logits[len(prompt) + n - 1])[-2:]
            assert top[1] - top[0] < 0.05
            break


def test_a_block_that_never_comes_is_an_error_and_the_gpu_goes_on(demo, monkeypatch):
    """Without the last block all others wait for its words, in vain but not for long: its lane's in the first
    layer, other lanes' where they read what it sends, two layers later. Any of them may be the first to give up."""
    ours, _ = demo
    real = ours.kernel.launch
    monkeypatch.setattr(ours, "wait_ns", 5 * 10**6)
    monkeypatch.setattr(ours.kernel, "launch", lambda blocks, *rest: real(blocks - 1, *rest))
    with pytest.raises(RunError, match=r"expired: rank 0, block \d+, layer [0-2], "):
        generate(ours, [3, 4], 5, SamplingParams(temperature=0))
    monkeypatch.undo()
    assert len(generate(ours, [3, 7], 5, SamplingParams(temperature=0))) == 5


THREE = PROMPTS[:3]


@pytest.fixture(scope="module")
def alone(demo):
    """What each prompt gives alone in one launch: tokens, and keys and values."""
    ours, out = demo[0], {}
    for prompt in THREE:
        tokens = tokens_of(run(ours, request(0, prompt, 60))[0])
        out[prompt] = tokens, held(ours, 0, len(prompt) + 59)
    return out


@pytest.mark.parametrize("most_steps", [0, 1, 7])
def test_slots_take_turns_and_launches_resume_bit_for_bit(demo, alone, monkeypatch, most_steps):
    ours, _ = demo
    if most_steps:
        monkeypatch.setattr(launcher, "_most_steps", lambda running, slots: most_steps)
    got = run(ours, *(request(slot, prompt, 60) for slot, prompt in enumerate(THREE)))
    for slot, prompt in enumerate(THREE):
        assert_alone(ours, slot, prompt, got[slot], alone)


def test_requests_join_are_cancelled_and_yield_while_others_run(demo, alone):
    ours, _ = demo
    server = Server(ours, request(0, PROMPTS[0], 800))
    server.read(0, 3)
    server.post(request(1, PROMPTS[1], 60), request(2, PROMPTS[2], 60))
    server.read(1, 5)
    server.mailbox.cancel(0)
    server.read(2, 10)
    server.mailbox.yield_now()
    server.finish()
    ours.forward_logits([1, 2, 3])  # leaves all slots alone
    server.mailbox.resume()
    server.start()
    steps = server.finish()
    assert steps[0][-1].finish == "cancel" and len(steps[0]) < 800
    count = min(60, len(steps[0]) - 1)
    assert tokens_of(steps[0])[:count] == alone[PROMPTS[0]][0][:count]
    for slot in (1, 2):
        assert_alone(ours, slot, PROMPTS[slot], steps[slot], alone)


def test_a_prompt_longer_than_a_launch_is_computed_alike(demo, monkeypatch):
    ours, _ = demo
    prompt = ids_of(ours.spec, 3 * launcher.MOST_SILENT + 5)
    got = run(ours, request(1, prompt, 20))[1]
    monkeypatch.setattr(launcher, "MOST_SILENT", 10**6)
    assert got == run(ours, request(0, prompt, 20))[0]
    cached = run(ours, request(1, prompt, 20, cached=300))[1]  # the slot holds them
    assert cached == got
