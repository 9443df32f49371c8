"""Streams: how steps arrive, and who runs beside a request, never changes what it gives."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kog_triton import LLM, SamplingParams
from kog_triton.text.tool_calls import ToolCall, ToolCallParser
from tests.lib.fake_backend import FakeBackend
from tests.lib.fake_checkpoint import END, make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=None)
BODY = '{"name": "f", "arguments": {"x": "é"}}'
CALL = ToolCall("f", '{"x": "é"}')
SIZES = st.lists(st.integers(1, 9), max_size=30)
examples = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(make_checkpoint(tmp_path_factory.mktemp("fake")), backend=FakeBackend) as llm:
        yield llm


def stream(llm, answer, params, sizes, parser="hermes"):
    """The deltas of `say:answer` if steps are read in groups of `sizes`, then one by one."""
    held, sizes = [], iter(sizes)
    running = llm.stream({"prompt_token_ids": [*b"say:", *answer]}, params)
    read = running._claim.read

    def in_groups(timeout):
        while not held or held[-1].finish is None:
            held.extend(read(timeout))
        size = next(sizes, 1)
        out, held[:] = held[:size], held[size:]
        return out

    calls = ToolCallParser(parser)
    content, found, texts, ids = "", [], "", []
    running._claim.read = in_groups
    for delta in running:
        texts, ids = texts + delta.text, ids + delta.token_ids
        piece = calls.feed(delta.text)
        content, found = content + piece.content, found + list(piece.calls)
    rest = calls.finish()
    final = delta.output.outputs[0]
    assert (texts, ids) == (final.text, final.token_ids)
    assert llm.engine.num_free_slots == 1
    return final, content + rest.content, found + list(rest.calls)


@examples
@given(answer=st.binary(max_size=30) | st.text(max_size=20).map(str.encode), sizes=SIZES)
def test_text_is_that_of_all_tokens_at_once(llm, answer, sizes):
    final, _, _ = stream(llm, answer, GREEDY, sizes)
    assert final.text == answer.decode("utf-8", "replace")
    assert final.token_ids == [*answer, END]
    assert (final.finish_reason, final.stop_reason) == ("stop", None)


@examples
@given(
    word=st.text("aé", min_size=2, max_size=4),
    cut=st.integers(1, 3),
    include=st.booleans(),
    sizes=SIZES,
    data=st.data(),
)
def test_the_stop_string_is_the_first_that_is_complete(llm, word, cut, include, sizes, data):
    stops = [word, word[cut:] or "b"]  # often both end at one place: then the longer one counts
    parts = st.sampled_from(["a", "é", "b", word, word[:cut], word[:-1]])
    answer = "".join(data.draw(st.lists(parts, max_size=6)))
    params = replace(GREEDY, stop=stops, include_stop_str_in_output=include)
    final, _, _ = stream(llm, answer.encode(), params, sizes)
    ends = [i for i in range(len(answer) + 1) if any(answer[:i].endswith(s) for s in stops)]
    if not ends:
        assert (final.text, final.stop_reason) == (answer, None)
        return
    end = ends[0]
    stop = max((s for s in stops if answer[:end].endswith(s)), key=len)
    assert final.stop_reason == stop and final.finish_reason == "stop"
    assert final.text == answer[: end if include else end - len(stop)]
    assert bytes(final.token_ids) == answer[:end].encode()


@examples
@given(
    parts=st.lists(st.sampled_from(["é", "<tool", f"<tool_call>{BODY}</tool_call>", "<tool_call>{"]), max_size=4),
    sizes=SIZES,
)
def test_tool_calls_do_not_depend_on_how_steps_arrive(llm, parts, sizes):
    answer = "".join(parts).encode()
    whole = stream(llm, answer, GREEDY, [500])
    assert stream(llm, answer, GREEDY, sizes) == whole
    if "<tool_call>{" not in parts and parts:
        assert whole[1] == "".join(p for p in parts if "_call" not in p)
        assert whole[2] == [CALL] * sum("_call" in p for p in parts)


# ---- neighbors ----


def test_neighbors_do_not_change_a_request():
    """On a real model: the same request alone, and beside three others that come and go."""
    params = SamplingParams(seed=7, temperature=0.8, top_p=0.95, repetition_penalty=1.1, max_tokens=24, logprobs=2)
    others = [
        SamplingParams(seed=1, temperature=1.3, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=31, presence_penalty=1.0),
        SamplingParams(seed=7, temperature=0.8, max_tokens=24, logit_bias={5: 4.0}),
    ]
    prompt = "def area(width, height):"
    texts = ["import os\n", "class Stack:\n    def push(", prompt]
    with LLM(num_slots=4) as llm:
        alone = llm.generate(prompt, params)[0].outputs[0]
        for place in range(4):
            llm.engine.forget()
            prompts, each = [*texts], [*others]
            prompts.insert(place, prompt)
            each.insert(place, params)
            beside = llm.generate(prompts, each)[place]
            assert beside.outputs[0] == alone
