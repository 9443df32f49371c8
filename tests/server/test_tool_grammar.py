"""The grammar of a forced call of Qwen3-Coder's: what it lets through is what the parser reads, and nothing else."""

import json

import pytest
from llguidance import LLMatcher

from kog_triton.server.tool_grammar import forced_call
from kog_triton.text.check_grammar import VOCABULARY
from kog_triton.text.qwen3_coder import Qwen3CoderParser

SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"$ref": "#/$defs/range"}, "mode": {"enum": ["read", "write"]}},
    "required": ["path", "lines"],
    "$defs": {"range": {"type": "array", "items": {"type": "integer"}}},
}
TOOLS = [
    {"type": "function", "function": {"name": "open", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
PATH = '<parameter=path>\na <b>\n</b> "c"\n</parameter>\n'
LINES = "<parameter=lines>\n[1, 2]\n</parameter>\n"
MODE = "<parameter=mode>\nread\n</parameter>\n"


def call(name, *parameters):
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


def allows(name, text):
    constraint = forced_call("qwen3_coder", TOOLS, name)
    source = LLMatcher.grammar_from_lark(constraint.grammar)
    matcher = LLMatcher(VOCABULARY, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ((PATH, LINES), {"path": 'a <b>\n</b> "c"', "lines": [1, 2]}),
        ((PATH, LINES, MODE), {"path": 'a <b>\n</b> "c"', "lines": [1, 2], "mode": "read"}),
    ],
)
def test_a_call_that_fits_its_schema_passes_and_is_read(parameters, arguments):
    text = call("open", *parameters)
    assert allows("open", text) and allows(None, text)
    parser = Qwen3CoderParser(TOOLS)
    (found,) = [*parser.feed(text).calls, *parser.finish().calls]
    assert (found.name, json.loads(found.arguments)) == ("open", arguments)


def test_a_tool_without_parameters_is_called_without():
    assert allows("stop", call("stop")) and allows(None, call("stop"))


@pytest.mark.parametrize(
    "text",
    [
        "no call",
        call("open", PATH),
        call("open", LINES),
        call("open", PATH, LINES.replace("2", "x")),
        call("open", PATH, LINES, MODE.replace("read", "list")),
        call("stop"),
        call("other"),
    ],
)
def test_another_text_does_not(text):
    assert not allows("open", text)
