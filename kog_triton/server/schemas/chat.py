"""POST /v1/chat/completions."""

from collections.abc import Collection, Iterable
from typing import Any, Literal

from pydantic import Field

from kog_triton.server.problems import Problem
from kog_triton.server.schemas.sampling import MAX_LOGPROBS, Body, Many, SamplingBody

MAX_MESSAGES = 1 << 16


class Message(Body):
    """One message; fields beside these go to the chat template as they are."""

    role: str = Field(max_length=64)
    content: str | Many[dict[str, Any]] | None = None
    tool_calls: Many[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Tool(Body):
    type: str = "function"
    function: dict[str, Any] | None = None


class ChatBody(SamplingBody):
    messages: Many[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Many[Tool] | None = Field(None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=64)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    modalities: Many[str] | None = None
    audio: dict[str, Any] | None = None
    functions: Many[dict[str, Any]] | None = None
    function_call: Any = None

    def _unknown(self) -> list[str]:
        return super()._unknown() + others(tool.type for tool in self.tools or ())


def others(kinds: Iterable[Any], known: Collection[Any] = ("function",)) -> list[str]:
    """Tools of kinds that nobody runs here, as x-kog-ignored names them; agents send them with their functions."""
    return [f"tools[{i}]: {str(kind)[:40]}" for i, kind in enumerate(kinds) if kind not in known]


def parts_of(content: Any, where: str) -> Any:
    """A message's content, of parts their kind and text alone. Problem 400 for a part that is no text."""
    if not isinstance(content, list):
        return content
    parts = []
    for i, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Problem(400, f"{where}[{i}] is of type {str(kind)[:40]}: only text is read", param=where)
        parts.append({"type": "text", "text": text})
    return parts


def content_of(role: Any, texts: list[str]) -> str | list[dict[str, Any]]:
    """The content of a message that came in another API's form: its texts become a chat's parts, but those of an
    assistant one text, as it was made."""
    if role == "assistant" or len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]
