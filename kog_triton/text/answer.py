"""An answer's text as reasoning, content and tool calls: the parsers of one model, one behind the other."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kog_triton.errors import RequestError
from kog_triton.text.qwen3_coder import Qwen3CoderParser
from kog_triton.text.reasoning import OPEN, ReasoningParser
from kog_triton.text.tool_calls import FORMATS, ToolCall, ToolCallParser

TOOL_PARSERS = (*FORMATS, "qwen3_coder")
REASONING_PARSERS = ("think",)


class AnswerDelta(NamedTuple):
    """What a piece of text made certain."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerParser:
    """`feed` text as it comes, then `finish`. One for each answer.

    tool_parser  a name of TOOL_PARSERS, None to leave calls in the text; RequestError for another name
    reasoning    whether reasoning is told apart; `inside`: the prompt has begun it
    one_call     only the first call is told
    """

    def __init__(
        self,
        tool_parser: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning: bool = False,
        inside: bool = False,
        *,
        one_call: bool = False,
    ) -> None:
        self._reasoning = ReasoningParser(inside) if reasoning else None
        self._tools = open_tool_parser(tool_parser, tools) if tool_parser else None
        self._one_call, self._called = one_call, False

    def feed(self, text: str) -> AnswerDelta:
        if self._reasoning is None:
            return self._answer("", text)
        split = self._reasoning.feed(text)
        return self._answer(split.reasoning, split.content)

    def finish(self) -> AnswerDelta:
        """The rest, once no more text comes."""
        rest = AnswerDelta()
        if self._reasoning is not None:
            split = self._reasoning.finish()
            rest = self._answer(split.reasoning, split.content)
        if self._tools is None:
            return rest
        last = self._tools.finish()
        calls = rest.calls + self._wanted(last.calls)
        return AnswerDelta(rest.reasoning, rest.content + last.content, calls)

    def _answer(self, reasoning: str, text: str) -> AnswerDelta:
        if self._tools is None or not text:
            return AnswerDelta(reasoning, text)
        delta = self._tools.feed(text)
        return AnswerDelta(reasoning, delta.content, self._wanted(delta.calls))

    def _wanted(self, calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
        wanted = calls if not self._one_call else () if self._called else calls[:1]
        self._called |= bool(calls)
        return wanted


def open_tool_parser(name: str, tools: Sequence[Mapping[str, Any]] = ()) -> ToolCallParser | Qwen3CoderParser:
    return Qwen3CoderParser(tools) if name == "qwen3_coder" else ToolCallParser(name)


def find_tool_parser(template: str) -> str | None:
    """The parser of the calls that a chat template teaches the model to write; None if it teaches none."""
    signs = {
        "<function=": "qwen3_coder",
        "<tool_call>": "hermes",
        "[TOOL_CALLS]": "mistral",
        "<|python_tag|>": "llama3_json",
        '"parameters": dictionary': "llama3_json",
    }
    return next((name for sign, name in signs.items() if sign in template), None)


def thinks(template: str) -> bool:
    """Whether a chat template knows of reasoning blocks."""
    return OPEN in template or "</think>" in template


def check_parsers(tool_parser: str, reasoning_parser: str) -> None:
    """RequestError for a name that is none; "auto" and "none" are."""
    for flag, name, names in (
        ("tool_call_parser", tool_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name not in ("auto", "none", *names):
            raise RequestError(f"{flag} is {name!r}: it must be one of auto, none, {', '.join(names)}")
