"""Several conversations in few slots: who is kept, who makes room, and how much memory they take.

The walks interleave conversations with cancels; each answer must be that of an engine that has seen
nothing, and what the fake backend computed must be what `cached_tokens` left over.
"""

import random
import time
from dataclasses import replace

import pytest

from kog_triton import LLM, SamplingParams
from kog_triton.demo import checkpoint_path
from kog_triton.errors import RunError
from tests.lib.fake_backend import FakeBackend
from tests.lib.fake_checkpoint import make_checkpoint

ONE = SamplingParams(temperature=0, max_tokens=1)  # a slot then holds the prompt alone
SYSTEM = "You are brief. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("fake"))


@pytest.fixture
def llm(folder):
    with LLM(folder, backend=FakeBackend, num_slots=3) as llm:
        yield llm


def ask(llm, prompt, params=ONE):
    """How many tokens of the prompt were cached, checked against what the backend had to run."""
    metrics = llm.generate(prompt, params)[0].metrics
    assert metrics.cached_tokens == metrics.prompt_tokens - llm.engine.backend.computed[-1]
    return metrics.cached_tokens


def test_the_least_recently_used_conversation_makes_room(llm):
    first = {name: name * 20 for name in "abc"}
    assert [ask(llm, first[name]) for name in "abc"] == [0, 0, 0]
    assert [ask(llm, first[name] + "?") for name in "ba"] == [20, 20]
    assert ask(llm, "d" * 20) == 0  # c was used before b and a
    assert [ask(llm, first[name] + "?!") for name in "ba"] == [21, 21]
    assert ask(llm, "d" * 20 + "?") == 20
    assert ask(llm, first["c"]) == 0  # takes the place of b
    assert [ask(llm, prompt) for prompt in ("d" * 20 + "?!", first["a"] + "?!?")] == [21, 22]
    assert ask(llm, first["b"]) == 0


def test_a_shared_system_prompt_does_not_evict_a_long_conversation(llm):
    long = SYSTEM + "a long talk " * 20
    assert ask(llm, long) == 0
    # reuse would keep 15 of 255 tokens, and there are empty slots
    assert [ask(llm, SYSTEM + "b" * 40), ask(llm, SYSTEM + "c" * 40)] == [0, 0]
    assert ask(llm, long + "and on") == len(long)
    # no slot is empty now: b's is the oldest, and its system prompt is still of use
    assert ask(llm, SYSTEM + "d" * 40) == len(SYSTEM)
    assert ask(llm, long + "and on and on") == len(long + "and on")
    assert ask(llm, SYSTEM + "c" * 40 + "?") == len(SYSTEM) + 40


@pytest.mark.parametrize(("lost", "cached"), [(19, 20), (20, 20), (21, 0)])
def test_a_slot_is_reused_if_it_keeps_at_least_half(llm, lost, cached):
    ask(llm, "k" * 20 + "x" * lost)
    assert ask(llm, "k" * 20 + "y") == cached
    # where half or more would go, the first conversation is still there
    kept = 20 + lost if cached == 0 else 20
    assert ask(llm, "k" * 20 + "x" * lost + "z") == kept


@pytest.mark.parametrize(("longer", "taken"), [("b" * 19, "a"), ("b" * 5, "b"), ("b" * 9, "a")])
def test_of_two_slots_that_keep_alike_the_one_with_less_to_lose_is_taken_else_the_older(llm, longer, taken):
    """Both keep 30 of what they hold, more than half."""
    prompts = {"a": "p" * 30 + "a" * 9, "b": "p" * 30 + longer}
    with llm.engine.paused():  # both start before one ends: neither finds the other's
        streams = [llm.stream(prompt, ONE) for prompt in prompts.values()]
    for stream in streams:
        list(stream)
    assert ask(llm, "p" * 30 + "c") == 30
    other = "b" if taken == "a" else "a"
    assert ask(llm, prompts[other] + "?") == len(prompts[other])


def test_a_slot_that_forgot_is_taken_before_one_that_remembers(folder):
    with LLM(folder, backend=FakeBackend, num_slots=2) as llm:
        ask(llm, "a" * 20)
        with pytest.raises(RunError, match="NaN in layer 3"):
            llm.generate("fail", replace(ONE, max_tokens=9))  # used last, and holds nothing now
        assert ask(llm, "b" * 20) == 0
        assert ask(llm, "a" * 20 + "?") == 20


def test_a_slot_takes_memory_once_it_is_used(folder):
    with LLM(folder, backend="reference", num_slots=9999, max_model_len=100) as llm:
        llm.generate("a", ONE)
        held = llm.engine.backend.memory_bytes()["kv_cache"]
        assert held == llm.kv_cache_bound_bytes() // 9999


@pytest.mark.parametrize("limit", [100, 300, 511])
def test_the_stated_bound_holds_and_is_reached(folder, limit):
    with LLM(folder, backend="reference", num_slots=3, max_model_len=limit) as llm:
        # slots x positions x keys and values x 1 layer x 1 head x 8 numbers x float32
        assert llm.kv_cache_bound_bytes() == 3 * limit * 2 * 1 * 1 * 8 * 4
        held = []
        for length in (1, limit // 2, limit - 8, limit - 1):
            for start in "abcd":
                llm.generate(start * length, ONE)
            held.append(llm.engine.backend.memory_bytes()["kv_cache"])
        assert held == sorted(held)
        assert held[-1] == llm.kv_cache_bound_bytes()
        llm.forward_logits(list(range(limit // 2)))
        assert llm.engine.backend.memory_bytes()["kv_cache"] == held[-1]


# ---- random walks ----


def walk(llm, seed, rounds, say):
    """Turns of 4 conversations in random order, some cancelled; (prompt ids, tokens, cached) each.

    A round goes on where its conversation ended, or now and then drops its last tokens first.
    """
    draw = random.Random(seed)
    system = llm.tokenizer.encode(say)
    talks = [[*system, *llm.tokenizer.encode(f"talk {i}: ")] for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for number in range(rounds):
        talk = talks[draw.randrange(4)]
        if draw.random() < 0.25:
            del talk[max(len(system), len(talk) - draw.randint(1, 30)) :]
        talk += llm.tokenizer.encode(f"and {number}? ")
        if len(talk) > 200:
            del talk[len(system) :]
            talk += llm.tokenizer.encode("again ")
        stop_after = draw.randint(1, 4) if draw.random() < 0.4 else 99
        stream = llm.stream({"prompt_token_ids": talk}, params)
        tokens = []
        for delta in stream:
            tokens += delta.token_ids
            if len(tokens) >= stop_after:
                break  # leaving a stream cancels it
        yield list(talk), tokens, stream.request.cached
        talk += tokens


@pytest.mark.parametrize("seed", range(6))
def test_interleaved_conversations_on_the_fake_backend(folder, llm, seed):
    seen: list[list[int]] = []
    reused = 0
    with LLM(folder, backend=FakeBackend) as cold:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        for prompt, tokens, cached in walk(llm, seed, 40, "no: be brief. "):
            cold.engine.forget()
            fresh = cold.generate({"prompt_token_ids": prompt}, params)[0]
            assert fresh.metrics.cached_tokens == 0
            assert fresh.outputs[0].token_ids[: len(tokens)] == tokens
            assert llm.engine.backend.computed[-1] == len(prompt) - cached
            # what is cached was once the beginning of something that ran here
            assert cached == 0 or any(old[:cached] == prompt[:cached] for old in seen)
            seen.append(prompt + fresh.outputs[0].token_ids)
            reused += cached
    deadline = time.monotonic() + 10  # a last one that was cancelled ends behind its token in hand
    while llm.engine.num_free_slots < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert llm.engine.num_free_slots == 3 and reused > 1000


def test_interleaved_conversations_on_the_demo():
    if not (checkpoint_path() / "config.json").is_file():
        pytest.skip("the demo checkpoint is not in this tree")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    reused = 0
    with (
        LLM(backend="reference", max_model_len=256, num_slots=3) as warm,
        LLM(backend="reference", max_model_len=256) as cold,
    ):
        for prompt, tokens, cached in walk(warm, 1, 14, "def add(a, b):\n    return a + b\n"):
            cold.engine.forget()
            want = replace(params, max_tokens=max(1, len(tokens)))
            fresh = cold.generate({"prompt_token_ids": prompt}, want)[0]
            assert fresh.outputs[0].token_ids[: len(tokens)] == tokens
            reused += cached
        assert warm.engine.backend.memory_bytes()["kv_cache"] <= warm.kv_cache_bound_bytes()
    assert reused > 100
