"""Reasoning, content and calls of an answer: every way of cutting the text gives the same."""

import json
import random

import pytest

from kog_triton.errors import RequestError
from kog_triton.text.answer import AnswerParser, check_parsers, find_tool_parser, thinks
from kog_triton.text.tool_calls import ToolCall
from tests import ROOT

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"n": {"type": "integer"}, "o": {"type": "object"}, "s": {"type": "string"}}},
        },
    }
]
CODER = (
    '<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=o>\n{"a": [1]}\n</parameter>\n'
    "<parameter=s>\n12\nlines </parameter> and </tool_call>\n</parameter>\n</function>\n</tool_call>"
)
CODER_CALL = ToolCall("f", '{"n": 5, "o": {"a": [1]}, "s": "12\\nlines </parameter> and </tool_call>"}')
HERMES = '<tool_call>\n{"name": "f", "arguments": {"x": "é<a>"}}\n</tool_call>'
HERMES_CALL = ToolCall("f", '{"x": "é<a>"}')

# parser, text, and what it is: reasoning, content, calls
CASES = {
    "plain": (("hermes", True), "Hello < there.", ("", "Hello < there.", [])),
    "thinks": (("hermes", True), "<think>\na < b\n\n</think>\n\nYes.", ("a < b", "Yes.", [])),
    "thinks and calls": (("hermes", True), f"<think>x</think>\n{HERMES}", ("x", "", [HERMES_CALL])),
    "calls in thoughts are thoughts": (("hermes", True), f"<think>{HERMES}</think>a", (HERMES, "a", [])),
    "two calls": (("hermes", False), f"Look: {HERMES}\n{HERMES}", ("", "Look: ", [HERMES_CALL] * 2)),
    "never ends": (("hermes", True), "<think>\nand so on </thi", ("and so on </thi", "", [])),
    "coder": (("qwen3_coder", False), f"Now. {CODER}\n", ("", "Now. ", [CODER_CALL])),
    "coder, two": (("qwen3_coder", True), f"{CODER}\n{CODER}", ("", "", [CODER_CALL] * 2)),
    "coder, cut off": (("qwen3_coder", False), f"x{CODER[:60]}", ("", f"x{CODER[:60]}", [])),
    "coder, no function": (
        ("qwen3_coder", False),
        "<tool_call>\n</function>\n</tool_call>!",
        ("", "<tool_call>\n</function>\n</tool_call>!", []),
    ),
    "a tag of reasoning, cut off": (("hermes", True), "<thi", ("", "<thi", [])),
    "no parsers": ((None, False), f"<think>{HERMES}", ("", f"<think>{HERMES}", [])),
}


def parse(how, pieces, inside=False):
    parser = AnswerParser(how[0], TOOLS, how[1], inside)
    deltas = [*map(parser.feed, pieces), parser.finish()]
    calls = [call for delta in deltas for call in delta.calls]
    return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls


def cuts(text, count):
    draw = random.Random(0)
    yield list(text)
    yield from ([text[:i], text[i:]] for i in range(len(text)))
    for _ in range(count):
        places = sorted(draw.sample(range(len(text) + 1), min(draw.randrange(1, 9), len(text))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same(name):
    how, text, (reasoning, content, calls) = CASES[name]
    assert parse(how, [text]) == (reasoning, content, calls)
    for pieces in cuts(text, 1000):
        assert parse(how, pieces) == (reasoning, content, calls), pieces


def test_a_prompt_that_has_opened_the_block():
    for pieces in cuts("hm\n</think>\n\nYes.", 100):
        assert parse((None, True), pieces, inside=True) == ("hm", "Yes.", [])


def test_a_piece_is_out_as_soon_as_it_is_certain():
    parser = AnswerParser("hermes", (), True)
    assert parser.feed("<think>one").reasoning == "one"
    assert parser.feed(" two</t").reasoning == " two"
    assert parser.feed("hink>").reasoning == ""
    assert parser.feed("\nab").content == "ab"


def test_parsers_are_found_by_the_template():
    folder = ROOT / "tests" / "data" / "chat_templates"
    found = {path.stem: find_tool_parser(path.read_text()) for path in folder.glob("*.jinja")}
    assert found["thinking"] == "hermes"
    assert found["plain"] is None
    assert thinks((folder / "thinking.jinja").read_text())
    assert not thinks((folder / "plain.jinja").read_text())
    assert thinks("{{ content.split('</think>') }}") and thinks("<think>")  # one tag is enough


def test_an_unknown_parser_is_refused():
    check_parsers("auto", "none")
    with pytest.raises(RequestError, match="tool_call_parser is 'x'"):
        check_parsers("x", "auto")
    with pytest.raises(RequestError, match="reasoning_parser is 'x'"):
        check_parsers("none", "x")


@pytest.mark.parametrize(
    ("schema", "value"),
    [({}, "12"), (None, "12"), ("x", "12"), ({"type": "string"}, "12"), ({"type": ["string", "null"]}, "12"),
     ({"type": "integer"}, 12), ({"enum": [12]}, 12)],
)  # fmt: skip
def test_a_value_of_qwen3_coder_is_text_unless_its_schema_asks_for_more(schema, value):
    function = {"name": "f", "parameters": {"properties": {"a": schema}}}
    parser = AnswerParser("qwen3_coder", [{"type": "function", "function": function}])
    call = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
    deltas = [parser.feed(call), parser.finish()]
    (made,) = [made for delta in deltas for made in delta.calls]
    assert json.loads(made.arguments) == {"a": value}
