"""Tool calls in text: every format, every way of cutting the stream, and what is no call.

The oracle of the properties is how the text was put together.
"""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kog_triton import LLM, SamplingParams
from kog_triton.errors import RequestError
from kog_triton.text.tool_calls import FORMATS, ToolCall, ToolCallParser
from tests.lib.fake_backend import FakeBackend
from tests.lib.fake_checkpoint import make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=None)
WEATHER = '{"name": "weather", "arguments": {"city": "Zürich"}}'
CALL = ToolCall("weather", '{"city": "Zürich"}')


def run(name, pieces):
    """(content, calls) after the last piece."""
    parser = ToolCallParser(name)
    deltas = [*map(parser.feed, pieces), parser.finish()]
    return "".join(d.content for d in deltas), [c for d in deltas for c in d.calls]


def cuts(data, text):
    """The text in pieces, some of them empty."""
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]


# ---- what is a call ----

CASES = [
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", 1),
    ("hermes", f"I look.\n<tool_call>{WEATHER}</tool_call>\n", "I look.\n", 1),
    ("hermes", f"<tool_call>{WEATHER}</tool_call>\n" * 3, "", 3),
    ("hermes", f"<tool_call>{WEATHER}</tool_call>\n so", "\n so", 1),
    ("hermes", f"<tool_call>{WEATHER}", "", 1),  # the end of text may stand for the closer
    ("hermes", f"<tool_call>{WEATHER}\n</tool_c", "", 1),
    ("hermes", f"<tool_call>{WEATHER}<tool_call>{WEATHER}</tool_call>", "", 2),
    ("hermes", f"<tool_call>{{\"name\": \"x\"</tool_call><tool_call>{WEATHER}</tool_call>",
     '<tool_call>{"name": "x"</tool_call>', 1),
    ("hermes", f"<tool_call>oops<tool_call>{WEATHER}", "<tool_call>oops", 1),
    ("hermes", f"<tool_call><tool_call>{WEATHER}", "<tool_call>", 1),
    ("hermes", f"a <tool_ca <tool_call>{WEATHER}", "a <tool_ca ", 1),
    ("hermes", WEATHER, WEATHER, 0),
    ("hermes", "1 < 2 <tool", "1 < 2 <tool", 0),
    ("llama3_json", WEATHER.replace("arguments", "parameters"), "", 1),
    ("llama3_json", f" <|python_tag|>{WEATHER}", "", 1),
    ("llama3_json", f"\n{WEATHER}; {WEATHER} ;{WEATHER}", "", 3),
    ("llama3_json", " \n", " \n", 0),
    ("hermes", " \n<tool", " \n<tool", 0),
    ("llama3_json", f"{WEATHER}; ", "", 1),
    ("llama3_json", f"{WEATHER}\nDone.", "\nDone.", 1),
    ("llama3_json", f"Look: {WEATHER}", f"Look: {WEATHER}", 0),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', 0),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}]", "", 1),
    ("mistral", f"[TOOL_CALLS][{WEATHER},\n{WEATHER}]\n", "", 2),
    ("mistral", f"Hm. [TOOL_CALLS] [{WEATHER}, {{\"name\"", 'Hm. , {"name"', 1),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, ", "", 1),
    ("mistral", f"[{WEATHER}] [TOOL", f"[{WEATHER}] [TOOL", 0),
    ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "num_calls"), CASES)
def test_content_and_calls(name, text, content, num_calls):
    assert run(name, [text]) == (content, [CALL] * num_calls)
    assert run(name, text) == (content, [CALL] * num_calls)


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "x", "arguments": "{}"}',
        '{"name": "x"}',
        '{"name": "x", "arguments": {"a": NaN}}',
        '{"name": "x", "arguments": {"a": 1e999}}',
        '{"name": "x", "arguments": {"a": "\\ud800"}}',
        '{"name": "x", "arguments": {"a": tru}}',
        '{"name": "x", "arguments": {"a" 1}]',
        '{"name": "x", "arguments": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"name": "x", "arguments": {"a": ' + "1" * 5000 + "}}",
        "[1]",
        "",
    ],
)
def test_a_malformed_call_is_content(body):
    text = f"<tool_call>{body}</tool_call>"
    assert run("hermes", [text]) == (text, [])


def test_markers_inside_a_string_are_part_of_it():
    arguments = json.dumps({"a": '</tool_call> "}] \\', "b": "[TOOL_CALLS];"})
    body = f'{{"name": "x", "arguments": {arguments}}}'
    want = [ToolCall("x", arguments)]
    assert run("hermes", f"<tool_call>{body}</tool_call>") == ("", want)
    assert run("mistral", f"[TOOL_CALLS] [{body}]") == ("", want)
    assert run("llama3_json", body) == ("", want)


def test_a_call_comes_as_soon_as_its_object_is_complete():
    parser = ToolCallParser("hermes")
    assert parser.feed(f"Hi <tool_call>{WEATHER[:-1]}").content == "Hi "
    assert parser.feed("}").calls == (CALL,)
    one_delta = ToolCallParser("hermes").feed(f"<tool_call>{WEATHER}</tool_call>" * 2)
    assert one_delta.calls == (CALL, CALL)


def test_an_unknown_parser_is_named():
    with pytest.raises(RequestError, match="'x': it must be one of hermes, llama3_json, mistral"):
        ToolCallParser("x")


# ---- every way of cutting ----

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.floats(-9, 9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
CALLS = st.lists(
    st.tuples(st.text("ab_", min_size=1, max_size=4), st.dictionaries(st.text(max_size=4), JSON)),
    min_size=1,
    max_size=3,
)


def written(name, calls, indent):
    key = "parameters" if name == "llama3_json" else "arguments"
    bodies = [json.dumps({"name": n, key: a}, indent=indent) for n, a in calls]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)
    if name == "mistral":
        return f"[TOOL_CALLS] [{', '.join(bodies)}]"
    return "<|python_tag|>" + "; ".join(bodies)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=100, deadline=None)
@given(calls=CALLS, before=st.text("ab <[|\n", max_size=6), indent=st.none() | st.integers(0, 2), data=st.data())
def test_well_formed_calls_survive_every_cut(name, calls, before, indent, data):
    text = before + written(name, calls, indent)
    before = before if before.strip() else ""
    parser, shown, got = ToolCallParser(name), "", []
    for piece in cuts(data, text):
        delta = parser.feed(piece)
        shown += delta.content
        got += delta.calls
        assert before.startswith(shown), "part of a marker got into the content"
    rest = parser.finish()
    assert (shown + rest.content, got + list(rest.calls)) == (before, got)
    assert [(c.name, json.loads(c.arguments)) for c in got] == calls


PARTS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[", "]", ";", ",", " "]
PARTS += ["\n", "{", "}", '"', "\\", "<", "x", WEATHER, WEATHER[:20], WEATHER[20:]]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=200, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=10), data=st.data())
def test_any_text_gives_the_same_however_it_is_cut(name, parts, data):
    text = "".join(parts)
    whole = run(name, [text])
    assert run(name, cuts(data, text)) == whole == run(name, text)
    assert whole[1] == [CALL] * len(whole[1])
    if not whole[1]:
        assert whole[0] == text


# ---- through LLM.chat ----


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    with LLM(make_checkpoint(tmp_path_factory.mktemp("fake")), backend=FakeBackend) as llm:
        yield llm


def answer(llm, text, params=GREEDY, **how):
    """The fake backend answers `text`; its own template would add to it, so it is a raw role."""
    llm.tokenizer.chat_templates["default"] = "{{ messages[0].content }}"
    talk = [{"role": "user", "content": f"say:{text}"}]
    return llm.chat(talk, params, **how)[0].outputs[0]


def test_chat_takes_calls_out_of_the_text(llm):
    text = f"Hm.\n<tool_call>{WEATHER}</tool_call>\n<tool_call>{WEATHER}</tool_call>"
    out = answer(llm, text, tools=[{"name": "weather"}], tool_call_parser="hermes")
    assert (out.text, out.tool_calls) == ("Hm.\n", [CALL, CALL])
    assert (out.finish_reason, out.stop_reason) == ("tool_calls", None)
    assert bytes(out.token_ids[:-1]).decode() == text
    plain = answer(llm, text)
    assert (plain.text, plain.tool_calls, plain.finish_reason) == (text, None, "stop")
    none = answer(llm, "no calls", tool_call_parser="hermes")
    assert (none.text, none.tool_calls, none.finish_reason) == ("no calls", [], "stop")


def test_a_limit_stays_the_reason(llm):
    text = f"<tool_call>{WEATHER}</tool_call> and more"
    limit = len(text.encode()) - 3
    out = answer(llm, text, replace(GREEDY, max_tokens=limit), tool_call_parser="hermes")
    assert (out.finish_reason, out.tool_calls, out.text) == ("length", [CALL], " and m")


def test_chat_refuses_a_parser_that_cannot_work(llm):
    with pytest.raises(RequestError, match="tool_call_parser is 'json'"):
        answer(llm, "x", tool_call_parser="json")
    with pytest.raises(RequestError, match="detokenize is False"):
        answer(llm, "x", replace(GREEDY, detokenize=False), tool_call_parser="hermes")
