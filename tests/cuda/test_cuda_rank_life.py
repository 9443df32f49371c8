"""The life of requests on ranks of the CUDA kernel: its own C++ on a CPU, all ranks' blocks as fibers, behind the
backend that serves real GPUs (tests/gpu/test_cuda_rank_life_gpu.py).

Whatever happens to a request or beside it, its tokens, and the keys and values that it leaves on each rank, are those
of the same request alone in one launch.
"""

import re

import numpy as np
import pytest
import torch

from kog_triton import LLM
from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError, RunError
from kog_triton.model.spec import Head
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_requests import (
    COUNT,
    PROMPTS,
    assert_cancelled_slot_goes_on,
    ended,
    error_of,
    interrupt,
    request,
    run,
    serve,
    timeless,
    tokens_of,
)
from tests.lib.cuda_walk import FiberBackend
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.ring_walker import f16_spec

TWO = f16_spec(vocab_size=100)
WAIT = 2000  # rounds, where a wait is to expire


def opened(spec=TWO, ranks=2, num_slots=1, **options):
    asked = BackendOptions(num_slots=num_slots, num_gpus=ranks, **options)
    return FiberBackend(RandomWeights(spec), asked, 2)


@pytest.fixture(scope="module")
def backend():
    return opened(num_slots=3)


def caches(backend, slot, positions):
    return [m.cache[slot][..., :positions, :].clone() for m in backend.ranks.each]


@pytest.fixture(scope="module")
def expected(backend):
    """{prompt: (steps, keys and values by rank)} of requests of 12 tokens alone."""
    out = {}
    for prompt in PROMPTS[:3]:
        steps = run(backend, request(0, prompt, 12))[0]
        out[prompt] = steps, caches(backend, 0, len(prompt) + 11)
    return out


def assert_alone(backend, slot, prompt, steps, expected):
    wanted, left = expected[prompt]
    assert [s.token for s in timeless(steps)] == [s.token for s in wanted[: len(steps)]]
    positions = len(prompt) + len(steps) - 1
    for own, other in zip(caches(backend, slot, positions), left, strict=True):
        assert torch.equal(own, other[..., :positions, :])


@pytest.mark.parametrize(("spec", "ranks"), [(TWO, 2), (mixed_lanes(Head.SUM_THEN_NORM), 4)])
def test_tokens_and_logits_are_the_references(spec, ranks):
    backend = opened(spec, ranks)
    assert backend.num_devices == ranks == len(backend.ranks.each)
    prompt = PROMPTS[2]
    tokens = tokens_of(serve(backend, request(0, prompt))[0])
    walked = 1 if spec.num_lanes > 1 else ranks
    reference = ReferenceBackend(RandomWeights(spec), BackendOptions(num_gpus=walked))
    ours = backend.forward_logits([*prompt, *tokens])
    logits = reference.forward_logits([*prompt, *tokens])
    assert np.sqrt(((ours - logits) ** 2).mean()) < 0.02
    rows = ours[len(prompt) - 1 : -1]
    assert tokens == rows.argmax(1).tolist() and len(tokens) == COUNT


def test_a_request_alone_is_one_launch(backend, expected):
    before = backend.kernel.launches
    steps = run(backend, request(1, PROMPTS[0], 12))[1]
    assert backend.kernel.launches == before + 1
    assert_alone(backend, 1, PROMPTS[0], steps, expected)


def test_requests_of_several_slots_take_turns(backend, expected):
    steps = serve(backend, *(request(slot, p, 12) for slot, p in enumerate(PROMPTS[:3])))
    for slot, prompt in enumerate(PROMPTS[:3]):
        assert_alone(backend, slot, prompt, steps[slot], expected)


def test_a_yield_returns_at_a_token_boundary_and_resumes(backend, expected, monkeypatch):
    server = interrupt(backend, monkeypatch, Mailbox.yield_now, request(0, PROMPTS[0], 12))
    assert not ended(server.finish()[0])
    backend.forward_logits([1, 2, 3])  # leaves all slots alone
    server.mailbox.resume()
    server.start()
    assert_alone(backend, 0, PROMPTS[0], server.finish()[0], expected)


def test_a_cancel_ends_a_request_and_its_slot_keeps_what_it_computed(backend):
    assert_cancelled_slot_goes_on(backend, 50)


def test_a_mask_that_comes_late_leaves_the_ranks_at_one_token(backend, expected, monkeypatch):
    """Of the second token: the launch ends in vain, and the next one goes on where all ranks stand."""
    seen = []

    def slow(output):
        if len(output) == 1 and not seen:
            seen.append(backend.kernel.launches)
            while backend.kernel.last.is_alive():
                pass

    monkeypatch.setattr(backend, "wait_ns", WAIT)
    steps = serve(backend, request(0, PROMPTS[0], 4, mask=slow))[0]
    assert_alone(backend, 0, PROMPTS[0], steps, expected)
    assert backend.kernel.launches == seen[0] + 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_never_launched_is_named_and_the_next_request_runs(backend, expected, monkeypatch, rank):
    with monkeypatch.context() as patched:
        patched.setattr(backend, "wait_ns", WAIT)
        patched.setattr(backend.kernel, "absent_rank", rank)
        error = error_of(serve(backend, request(0, PROMPTS[0]))[0])
    assert isinstance(error, RunError)
    assert re.fullmatch(
        rf"a wait of the kernel expired: rank {1 - rank}, block \d, layer 0, attention_out, word \d+ of "
        rf"attention_out_now, seen 0, wanted 1, after 0 steps; the kernel of rank {rank} told nothing after 0 steps",
        str(error),
    )
    assert_alone(backend, 0, PROMPTS[0], run(backend, request(0, PROMPTS[0], 12))[0], expected)


def test_a_rank_that_leaves_before_the_others_is_named(backend, expected, monkeypatch):
    real = backend.kernel.launch

    def launch(blocks, threads, arguments):
        arguments[1].most_steps = 4  # the prompt's three, and one
        return real(blocks, threads, arguments)

    with monkeypatch.context() as patched:
        patched.setattr(backend, "wait_ns", WAIT)
        patched.setattr(backend.kernel, "launch", launch)
        steps = serve(backend, request(0, PROMPTS[0]))[0]
    assert [s.token for s in steps[:-1]] == [s.token for s in expected[PROMPTS[0]][0][:2]]
    said = str(steps[-1].error)
    assert "rank 0, block " in said and said.endswith("; rank 1 left after 4 steps")
    assert_alone(backend, 0, PROMPTS[0], run(backend, request(0, PROMPTS[0], 12))[0], expected)


def test_an_llm_on_two_gpus_continues_a_conversation(tmp_path):
    folder = make_checkpoint(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(folder, backend=FiberBackend, tensor_parallel_size=2, dtype="bf16") as llm:
        assert llm.engine.backend.num_devices == 2
        talk = list(b"ab")
        for cached in (0, 5):
            out = llm.generate({"prompt_token_ids": talk}, params)[0]
            assert out.metrics.cached_tokens == cached
            with LLM(folder, backend=FiberBackend, tensor_parallel_size=2, dtype="bf16") as cold:
                fresh = cold.generate({"prompt_token_ids": talk}, params)[0]
            assert fresh.outputs[0].token_ids == out.outputs[0].token_ids
            talk += [*out.outputs[0].token_ids, ord("!")]
        held = llm.engine.backend.memory_bytes()
    with LLM(folder, backend=FiberBackend, dtype="bf16") as llm:
        one = llm.engine.backend.memory_bytes()
    assert held["kv_cache"] == 2 * one["kv_cache"]  # both ranks hold its one KV head


# ---- what is refused ----


def test_what_ranks_cannot_do_yet_is_refused(backend):
    with pytest.raises(DeviceError, match="a stage alone runs on one GPU: leave --gpus out"):
        backend.run_stage("embed", 0, {"token_ids": torch.tensor([1])})
    with pytest.raises(DeviceError, match="several GPUs are profiled together: kog profile --gpus N"):
        backend.profile([1, 2], 2)
