"""POST /v1/messages: Anthropic's form of a conversation, as a chat request."""

import json
from typing import Any, Literal

from pydantic import Field, model_validator

from kog_triton.server.problems import Problem
from kog_triton.server.schemas.chat import ChatBody, content_of, others
from kog_triton.server.schemas.sampling import SHAPED, SHAPING, Body, Many, StreamBody

# A coding agent puts a line that changes with each request before its system prompt: with it no prefix is ever reused.
CHANGING = "x-anthropic-billing-header:"
FUNCTIONS = (None, "custom")  # types of tools: of others, which Anthropic runs, a request describes no arguments


class MessageBlock(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Many[dict[str, Any]]


class Conversation(Body):
    """What a request is made of, and a count of its tokens asks for."""

    model: str = ""
    messages: Many[MessageBlock] = Field(min_length=1)
    system: str | Many[dict[str, Any]] | None = None
    tools: Many[dict[str, Any]] | None = Field(default=None, max_length=1024)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None

    def _unknown(self) -> list[str]:
        kinds = (tool.get("type") for tool in self.tools or ())
        return super()._unknown() + others(kinds, FUNCTIONS)

    def chat_fields(self) -> dict[str, Any]:
        """Fields of a chat request; Problem 400 for what is not supported."""
        messages: list[dict[str, Any]] = []
        if self.system is not None and (text := _system(self.system)):
            messages.append({"role": "system", "content": text})
        for i, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{i}]")
        tools = [_tool(tool, i) for i, tool in enumerate(self.tools or ()) if tool.get("type") in FUNCTIONS]
        thinks = (self.thinking or {}).get("type")
        if thinks not in (None, "enabled", "disabled", "adaptive"):
            raise Problem(
                400, f"thinking.type is {str(thinks)[:40]}: it must be enabled, disabled or adaptive", param="thinking"
            )
        kwargs = {"enable_thinking": thinks != "disabled"} if thinks is not None else None
        return {
            "model": self.model,
            "messages": messages,
            "tools": tools or None,
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": not (self.tool_choice or {}).get("disable_parallel_tool_use"),
            "chat_template_kwargs": kwargs,
        }

    def _tool_choice(self) -> Any:
        choice = self.tool_choice or {}
        kind = choice.get("type", "auto")
        if kind == "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        if kind not in ("auto", "any", "none"):
            raise Problem(
                400, f"tool_choice.type is {str(kind)[:40]}: it must be auto, any, tool or none", param="tool_choice"
            )
        return "required" if kind == "any" else kind


class MessagesBody(Conversation, StreamBody):
    max_tokens: int = Field(ge=1, lt=1 << 31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    stop_sequences: Many[str] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # its older place

    @model_validator(mode="after")
    def _check_known(self) -> "MessagesBody":
        self.refuse(SHAPING, "output_config")
        return self

    def chat(self) -> ChatBody:
        """The same as a chat request; agents ask for more tokens than there is room, which are cut to it."""
        same = ("top_k", "max_tokens", *SHAPED)
        fields = self.chat_fields() | {name: getattr(self, name) for name in same}
        fields |= {"stop": self.stop_sequences, "response_format": self._format()}
        return ChatBody.model_validate(fields)

    def _format(self) -> dict[str, Any] | None:
        """What shapes the answer, as a chat request says it."""
        form = (self.output_config or {}).get("format") or self.output_format
        if form is None:
            return None
        schema = form.get("schema") if isinstance(form, dict) else None
        if not isinstance(schema, dict) or form.get("type") != "json_schema":
            raise Problem(
                400,
                "output_config.format must be of type json_schema, with an object as its schema",
                param="output_config",
            )
        return {"type": "json_schema", "json_schema": {"schema": schema}}


def _system(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    texts = [_text(block, "system") for block in system]
    return "\n\n".join(text for text in texts if not text.startswith(CHANGING))


def _text(block: Any, where: str) -> str:
    text = block.get("text") if isinstance(block, dict) else None
    if not isinstance(text, str):
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        raise Problem(400, f"{where} holds {str(kind)[:40]}: only text is read", param="messages")
    return text


def _messages(message: MessageBlock, where: str) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says beside them."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in message.content:
        kind = block.get("type")
        if kind == "tool_result":
            content = block.get("content") or ""
            told = content
            if not isinstance(content, str):
                told = content_of("tool", [_text(b, where) for b in content])
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": told})
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(_text(block, where))
    if not texts and not calls and not thoughts:
        return results
    told_message: dict[str, Any] = {"role": message.role, "content": content_of(message.role, texts)}
    if calls:
        told_message["tool_calls"] = calls
    if thoughts:
        told_message["reasoning_content"] = "".join(thoughts)
    return [*results, told_message]


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise Problem(400, f"tools[{index}] has no input_schema", param="tools")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
