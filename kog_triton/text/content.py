"""What a message's content becomes before a template sees it: text, or the list of its parts.

Clients give either. A template that joins content to text fails on a list, or writes down Python's way of showing one;
so parts are joined where the template has no loop over them, as vLLM does, and what is no text is refused by name.
"""

import re
from collections.abc import Mapping
from typing import Any

from kog_triton.errors import RequestError, shown, wrong

FORMATS = ("auto", "string", "openai")
LOOP = re.compile(r"\{%-?\s*for\s+\w+\s+in\s+[^%]*\bcontent\b")  # over the parts of a content
SEEN = re.compile("image|audio|video")


def formatted(messages: list[dict[str, Any]], how: str, template: str) -> list[dict[str, Any]]:
    """The messages in one of FORMATS; RequestError for a part that is no text."""
    if how not in FORMATS:
        raise wrong("chat_template_content_format", how, f"one of {', '.join(FORMATS)}")
    in_parts = how == "openai" or (how == "auto" and LOOP.search(template) is not None)
    out = []
    for n, message in enumerate(messages):
        where, content = f"messages[{n}].content", message.get("content")
        if isinstance(content, list):
            _check_parts(content, where)
            content = content if in_parts else "\n".join(_text_of(p, where) for p in content)
            message = message | {"content": content}
        elif content is None and message.get("tool_calls") and not in_parts:
            message = message | {"content": ""}
        out.append(message)
    return out


def _check_parts(parts: list[Any], where: str) -> None:
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and SEEN.search(kind):
            raise RequestError(f"{where} has a part of type {shown(kind)}: models read text alone")


def _text_of(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise RequestError(f"{where} has the part {shown(part)}: the chat template reads text alone")
    return text
