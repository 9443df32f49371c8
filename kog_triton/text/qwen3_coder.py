"""Tool calls as Qwen3-Coder writes them, found as the text streams in.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

A value is text: whether it means a number or an object is known from the tool's JSON schema. Content and complete
calls come out, as from ToolCallParser; a call that never ended is content.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kog_triton.text.stop import overlap
from kog_triton.text.tool_calls import ToolCall, ToolDelta

OPEN, CLOSE = "<tool_call>", "</tool_call>"
END_FUNCTION = "</function>"
END = re.compile(END_FUNCTION + r"\s*" + CLOSE)
FUNCTION = re.compile(r"<function=([^<>\n]+)>")
PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.S)


class Qwen3CoderParser:
    """`feed` text as it comes, then `finish`. One for each answer; `tools` in OpenAI's form."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function") or {} for tool in tools]
        self._schemas = {f.get("name"): f.get("parameters") or {} for f in functions}
        self._held = ""
        self._inside = False
        self._seen = 0  # of what is held inside a call: no end before it
        self._gap: str | None = ""  # white space at the start or after a call; None: text came

    def feed(self, text: str) -> ToolDelta:
        self._held += text
        content, calls = "", []
        while True:
            if not self._inside:
                at = self._held.find(OPEN)
                cut = at if at >= 0 else len(self._held) - overlap(self._held, OPEN)
                content += self._say(self._held[:cut])
                self._held = self._held[cut:]
                if at < 0:
                    break
                self._inside, self._seen = True, 0
            end = END.search(self._held, self._seen)
            if end is None:
                self._seen = self._next_end()
                break
            block, self._held = self._held[: end.end()], self._held[end.end() :]
            self._inside = False
            call = self._call(block)
            if call is None:
                content += self._say(block)
            else:
                calls.append(call)
                self._gap = ""
        return ToolDelta(content, tuple(calls))

    def finish(self) -> ToolDelta:
        held, self._held = self._held, ""
        return ToolDelta(self._say(held))

    def _next_end(self) -> int:
        """No end of the call begins before this place in what is held."""
        at = self._held.rfind(END_FUNCTION, self._seen)
        behind = self._held[at + len(END_FUNCTION) :].lstrip()
        if at >= 0 and CLOSE.startswith(behind[: len(CLOSE)]):
            return at
        return max(0, len(self._held) - len(END_FUNCTION))

    def _say(self, text: str) -> str:
        """Content, without white space alone before, between or after calls."""
        if self._gap is None:
            return text
        if not text.strip():
            self._gap += text
            return ""
        text, self._gap = self._gap + text, None
        return text

    def _call(self, block: str) -> ToolCall | None:
        name = FUNCTION.search(block)
        if name is None:
            return None
        properties = self._schemas.get(name[1], {}).get("properties") or {}
        arguments = {key: _value(text, properties.get(key)) for key, text in PARAMETER.findall(block, name.end())}
        try:
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            (name[1] + written).encode()
        except ValueError:
            return None
        return ToolCall(name[1], written)


def _value(text: str, schema: Any) -> Any:
    """What a value means: text, unless the schema asks for something else and the text is JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if "string" in kinds or not (isinstance(schema, Mapping) and schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
