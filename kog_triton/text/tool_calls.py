"""Tool calls in the text of an answer, found as it streams in.

    hermes       <tool_call> {"name": ..., "arguments": {...}} </tool_call>     Hermes, Qwen
    llama3_json  {"name": ..., "parameters": {...}} ; ...    at the start or after <|python_tag|>
    mistral      [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]

Text goes in, content and complete calls come out. The parser looks at one character at a time, so
how a stream was cut cannot change the result. What could still be part of a call is held back; what
turns out to be none is content. White space alone before, between or after calls is dropped.
"""

import json
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from kog_triton.errors import RequestError


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolDelta(NamedTuple):
    """What a piece of text made certain."""

    content: str = ""
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Format:
    """How a family of models writes calls: opener, object, then separator and object, closer."""

    opener: str
    separator: str = ""
    closer: str = ""
    in_list: bool = False  # "[" comes between the opener and the first object
    bare_start: bool = False  # an answer may start with an object, without the opener
    argument_keys: tuple[str, ...] = ("arguments",)


FORMATS = {
    "hermes": Format("<tool_call>", closer="</tool_call>"),
    "llama3_json": Format("<|python_tag|>", separator=";", bare_start=True, argument_keys=("parameters", "arguments")),
    "mistral": Format("[TOOL_CALLS]", separator=",", closer="]", in_list=True),
}
WHITE = frozenset(" \t\r\n")
# outside its strings a JSON object holds nothing else: numbers, true, false, null, punctuation
PLAIN_JSON = WHITE | frozenset('{}[],:"+-.0123456789eEtrufalsn')


class _State(Enum):
    START = auto()  # nothing but white space so far, and an object may come
    TEXT = auto()  # content; `_held` may become the opener
    LIST = auto()  # "[" must come
    BEFORE = auto()  # an object must come
    OBJECT = auto()
    AFTER = auto()  # separator or closer may come; `_held` is the beginning of one


class ToolCallParser:
    """`feed` text as it comes, then `finish`. One for each answer."""

    def __init__(self, name: str) -> None:
        if name not in FORMATS:
            raise RequestError(f"tool_call_parser is {name!r}: it must be one of {', '.join(FORMATS)}")
        self._format = FORMATS[name]
        self._state = _State.START if self._format.bare_start else _State.TEXT
        self._held: list[str] = []  # characters that are neither content nor a call yet
        self._gap: list[str] | None = []  # white space at the start or after a call; None: text came
        self._called = False
        self._object_start = 0  # in `_held`
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, text: str) -> ToolDelta:
        for character in text:
            self._step(character)
        return self._take()

    def finish(self) -> ToolDelta:
        """The rest, once no more text comes: a call that never ended is content."""
        after_a_call = self._held[:1] == [self._format.separator]
        if self._state is _State.AFTER or (self._state is _State.BEFORE and after_a_call):
            self._held = []  # half a closer, or a separator with nothing behind it
        if not self._called:
            self._held = (self._gap or []) + self._held
            self._gap = None
        self._say(self._held)
        return self._take()

    def _take(self) -> ToolDelta:
        delta = ToolDelta("".join(self._content), tuple(self._calls))
        self._content, self._calls = [], []
        return delta

    def _say(self, characters: list[str]) -> None:
        if characters:
            self._content += (self._gap or []) + characters
            self._gap = None

    def _step(self, c: str) -> None:
        if self._state is _State.TEXT:
            self._text(c)
        elif self._state is _State.OBJECT:
            self._object(c)
        elif self._state is _State.AFTER:
            self._after(c)
        elif c in WHITE and self._state is _State.START:
            self._text(c)
        elif c in WHITE:
            self._held.append(c)
        elif self._state is _State.LIST and c == "[":
            self._held.append(c)
            self._state = _State.BEFORE
        elif self._state is not _State.LIST and c == "{":
            self._state = _State.OBJECT
            self._object_start, self._depth = len(self._held), 0
            self._object(c)
        else:
            self._give_up(c)

    def _give_up(self, c: str) -> None:
        """What is held is content, and `c` may start something new."""
        self._say(self._held)
        self._held, self._state = [], _State.TEXT
        self._in_string = self._escaped = False
        self._text(c)

    def _text(self, c: str) -> None:
        if self._gap is not None and not self._held and c in WHITE:
            self._gap.append(c)
            return
        self._held.append(c)
        while self._held and not self._format.opener.startswith("".join(self._held)):
            self._say([self._held.pop(0)])
        if len(self._held) == len(self._format.opener):
            self._state = _State.LIST if self._format.in_list else _State.BEFORE

    def _object(self, c: str) -> None:
        if not self._in_string and c not in PLAIN_JSON:
            self._give_up(c)
            return
        self._held.append(c)
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = c == "\\"
            self._in_string = c != '"'
        elif c == '"':
            self._in_string = True
        else:
            self._depth += (c in "{[") - (c in "}]")
            if self._depth == 0:
                self._end_object()

    def _end_object(self) -> None:
        call = _call("".join(self._held[self._object_start :]), self._format.argument_keys)
        if call is None:
            self._say(self._held)
            self._state = _State.TEXT
        else:
            self._calls.append(call)
            self._gap, self._called = [], True
            self._state = _State.AFTER
        self._held = []

    def _after(self, c: str) -> None:
        if self._gap is not None and not self._held and c in WHITE:
            self._gap.append(c)
            return
        self._held.append(c)
        seen = "".join(self._held)
        if seen == self._format.separator:
            self._gap, self._state = None, _State.BEFORE
        elif seen == self._format.closer:
            self._held, self._gap, self._state = [], [], _State.TEXT
        elif not self._format.closer.startswith(seen):  # it may be the start of an opener
            again, self._held, self._state = self._held, [], _State.TEXT
            for character in again:
                self._text(character)


def _call(text: str, argument_keys: tuple[str, ...]) -> ToolCall | None:
    """The call that an object describes, None if it is no JSON or no call."""
    try:
        value = json.loads(text)
        key = next((k for k in argument_keys if k in value), "")
        name, arguments = value.get("name"), value.get(key)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        # neither infinities nor lone surrogates can be sent on
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + written).encode()
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, written)
