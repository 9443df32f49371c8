"""What a slot remembers: a warm run equals a cold one, whatever happened to the slot before.

On the fake backend, and with a real forward pass on the reference backend (the demo, if present).
"""

import itertools
import random
import threading
from dataclasses import replace
from queue import SimpleQueue

import pytest

from kog_triton import LLM, SamplingParams
from kog_triton.backends.reference import CHUNK
from kog_triton.demo import checkpoint_path
from kog_triton.errors import RunError
from tests.lib.fake_backend import GREEDY, FakeBackend, cold, next_logits


def test_a_conversation_is_computed_from_where_it_ended(folder, narrow):
    first = narrow.generate("Hello", GREEDY)[0]
    prompt = "Hello" + first.outputs[0].text + " and?"
    second = narrow.generate(prompt, GREEDY)[0]
    # the last of 12 tokens was never written
    assert second.metrics.cached_tokens == len("Hello") + 11
    assert narrow.engine.backend.computed == [5, len(prompt) - 16]
    assert second.outputs[0] == cold(folder, prompt)


def test_the_same_prompt_again_computes_its_last_token(folder, narrow):
    outs = [narrow.generate("Hello", GREEDY)[0] for _ in range(2)]
    assert [o.metrics.cached_tokens for o in outs] == [0, 4]
    assert outs[1].outputs[0] == outs[0].outputs[0] == cold(folder, "Hello")


@pytest.mark.parametrize("after", [1, 3, 7])
def test_reuse_after_a_cancel_equals_a_cold_run(folder, narrow, after):
    prompt, seen = "slow Hello", []
    stream = narrow.stream(prompt, replace(GREEDY, max_tokens=None))
    for delta in stream:
        seen += delta.token_ids
        if len(seen) >= after:
            stream.cancel()
    assert delta.output.outputs[0].finish_reason == "abort"
    longer = prompt + bytes(seen).decode() + "!"
    again = narrow.generate(longer, GREEDY)[0]
    assert again.metrics.cached_tokens >= len(prompt) + len(seen) - 1
    assert again.outputs[0] == cold(folder, longer)


def test_reuse_after_a_stop_string_equals_a_cold_run(folder, narrow):
    first = narrow.generate("slow say:ab;cd;", replace(GREEDY, stop=";"))[0].outputs[0]
    assert first.text == "ab"
    longer = "slow say:ab;cd;ab;X"
    again = narrow.generate(longer, GREEDY)[0]
    assert again.metrics.cached_tokens > len("slow say:ab;cd;")
    assert again.outputs[0] == cold(folder, longer)


def test_leaving_a_stream_early_frees_and_keeps_the_slot(folder, narrow):
    stream = narrow.stream("slow Hi", replace(GREEDY, max_tokens=None))
    for delta in stream:
        if delta.text:
            break
    stream.close()
    assert narrow.engine.num_free_slots == 1
    assert narrow.generate("slow Hi", GREEDY)[0].outputs[0] == cold(folder, "slow Hi")


def test_the_slot_with_the_longest_match_is_taken_else_the_oldest(llm):
    llm.generate("aaaa", GREEDY)
    llm.generate("bbbb", GREEDY)
    assert llm.generate("aaaaX", GREEDY)[0].metrics.cached_tokens == 4  # a's slot, now the newest
    llm.generate("cccc", GREEDY)  # takes b's
    assert llm.generate("aaaaY", GREEDY)[0].metrics.cached_tokens == 4
    assert llm.generate("bbbbY", GREEDY)[0].metrics.cached_tokens == 0


def test_salts_do_not_share_keys_and_values(narrow):
    engine = narrow.engine
    cached = []
    for salt in ("x", "y", "y", "x"):
        claim = engine.start(engine.prepare(list(b"Hello"), GREEDY, cache_salt=salt))
        while not claim.ended:
            claim.read()
        cached.append(claim.request.cached)
    assert cached == [0, 0, 4, 0]


def test_a_crash_beside_a_free_slot_makes_it_forget(folder, llm):
    """Its keys and values are still there, but who says that they are right?"""
    one = replace(GREEDY, max_tokens=1)  # the slot then holds the prompt alone
    llm.generate("Hello", one)
    assert llm.generate("Hello", one)[0].metrics.cached_tokens == 4
    with pytest.raises(RunError, match="the device is gone"):
        llm.generate("crash of the other slot", GREEDY)
    again = llm.generate("Hello", GREEDY)[0]
    assert again.metrics.cached_tokens == 0 and again.outputs[0] == cold(folder, "Hello")


def test_forget_empties_the_slots(narrow):
    narrow.generate("Hello", GREEDY)
    narrow.engine.forget()
    assert narrow.generate("Hello", GREEDY)[0].metrics.cached_tokens == 0


def test_reuse_after_a_cancel_in_the_middle_of_the_prompt(folder, narrow, monkeypatch):
    prompt = "slow " + "x" * 400
    passes = itertools.count(1)

    def tenth_of_51(seconds):
        if next(passes) == 10:
            stream.cancel()

    stream = narrow.stream(prompt, GREEDY)
    with monkeypatch.context() as patched:
        patched.setattr("tests.lib.fake_backend.time.sleep", tenth_of_51)
        (last,) = stream
    assert last.output.outputs[0].finish_reason == "abort"
    again = narrow.generate(prompt, GREEDY)[0]
    assert 0 < again.metrics.cached_tokens < 400
    assert again.outputs[0] == cold(folder, prompt)


def test_threads_that_share_the_slots_and_give_up_at_random_get_the_right_tokens(folder):
    def expected(prompt, count):
        held = list(prompt)
        for _ in range(count):
            held.append(int(next_logits(held, len(prompt)).argmax()))
        return held[len(prompt) :]

    def client(llm, seed):
        draw = random.Random(seed)
        for _ in range(12):
            prompt = b"shared prefix " * draw.randint(1, 3) + bytes([97 + draw.randrange(3)])
            stream = llm.stream(prompt.decode(), replace(GREEDY, max_tokens=20))
            give_up, seen = draw.randint(1, 30), []
            for delta in stream:
                seen += delta.token_ids
                if len(seen) >= give_up:
                    break
            stream.close()
            wrong[seed] += seen != expected(prompt, len(seen))

    wrong = [0] * 4
    with LLM(folder, backend=FakeBackend, num_slots=4) as llm:
        threads = [threading.Thread(target=client, args=(llm, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert not any(thread.is_alive() for thread in threads)
        assert llm.engine.num_free_slots == 4 and wrong == [0] * 4
        assert len(llm.engine.backend.computed) == 48


# ---- with a real forward pass ----


def model_folder(name, folder):
    """The demo if it is there, or the random one-layer Llama that the fake backend opens."""
    if name == "random":
        return folder
    if not (checkpoint_path() / "config.json").is_file():
        pytest.skip("the demo checkpoint is not in this tree")
    return None


@pytest.mark.parametrize("name", ["random", "demo"])
def test_reference_streams_what_it_generates_and_reuses_what_it_holds(folder, name):
    model, text = model_folder(name, folder), "def add(a, b):\n"
    params = replace(GREEDY, ignore_eos=True, max_tokens=10)
    with LLM(model, backend="reference", max_model_len=128) as llm:
        first = llm.generate(text, params)[0]
        ids = first.prompt_token_ids + first.outputs[0].token_ids
        stream = llm.stream({"prompt_token_ids": ids}, params)
        seen = list(stream)
        warm = seen[-1].output
        logits = llm.forward_logits(ids + warm.outputs[0].token_ids)
    assert "".join(d.text for d in seen) == warm.outputs[0].text
    assert (warm.metrics.cached_tokens, warm.metrics.output_tokens) == (len(ids) - 1, 10)
    with LLM(model, backend="reference", max_model_len=128) as llm:
        fresh = llm.generate({"prompt_token_ids": ids}, params)[0]
    assert fresh.metrics.cached_tokens == 0
    assert fresh.outputs[0].token_ids == warm.outputs[0].token_ids
    assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == warm.outputs[0].token_ids


def test_reference_keeps_what_a_cancel_leaves_of_an_answer(folder):
    params = replace(GREEDY, ignore_eos=True, max_tokens=None)
    with LLM(folder, backend="reference") as llm:
        stream = llm.stream("Hello", params)
        for _ in stream:
            if len(stream.token_ids) >= 3:
                break
        stream.close()
        ids = [*stream.request.prompt, *stream.token_ids, 65]
        again = llm.generate({"prompt_token_ids": ids}, GREEDY)[0]
        # of what was read; the token that was made last may have no keys and values yet
        assert again.metrics.cached_tokens >= len(ids) - 2
        assert again.outputs[0].token_ids == greedy_ids(llm, ids, again)


def test_reference_keeps_what_a_cancel_leaves_of_a_prompt(folder):
    prompt = [66 + i % 7 for i in range(CHUNK + 60)]
    with LLM(folder, backend="reference") as llm:
        forward = llm.engine.backend.forward

        streams = SimpleQueue()

        def cancelled(*arguments, **options):
            streams.get(timeout=20).cancel()
            return forward(*arguments, **options)

        llm.engine.backend.forward = cancelled
        stream = llm.stream({"prompt_token_ids": prompt}, GREEDY)
        streams.put(stream)
        (last,) = stream
        assert last.output.outputs[0].finish_reason == "abort" and not stream.token_ids
        llm.engine.backend.forward = forward
        again = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0]
        assert again.metrics.cached_tokens == CHUNK
        assert again.outputs[0].token_ids == greedy_ids(llm, prompt, again)
        llm.engine.forget()
        whole = llm.generate({"prompt_token_ids": prompt}, GREEDY)[0]
        assert whole.outputs[0] == again.outputs[0]


def greedy_ids(llm, prompt, output):
    """What a forward pass without a cache chooses after the prompt and each of the output's ids."""
    ids = [*prompt, *output.outputs[0].token_ids]
    return llm.forward_logits(ids)[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", ["random", "demo"])
def test_reference_answers_alike_alone_and_beside_others(folder, name):
    model, prompts = model_folder(name, folder), ["def f(x):", "import os\n", "class A", "for i in"]
    params = SamplingParams(max_tokens=8, seed=3, n=2, logprobs=1)
    with LLM(model, backend="reference", max_model_len=64, num_slots=3) as llm:
        together = llm.generate(prompts, params)
    with LLM(model, backend="reference", max_model_len=64) as llm:
        alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    for a, b in zip(together, alone, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert all(o.cumulative_logprob < 0 for o in a.outputs)
