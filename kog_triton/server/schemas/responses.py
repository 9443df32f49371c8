"""POST /v1/responses: OpenAI's newer form of a conversation, as a chat request."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kog_triton.server.problems import Problem
from kog_triton.server.schemas.chat import ChatBody, content_of, others
from kog_triton.server.schemas.sampling import MAX_LOGPROBS, SHAPED, SHAPING, Body, Many, StreamBody

PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class Reasoning(Body):
    effort: str | None = Field(default=None, max_length=64)
    summary: str | None = None


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class Text(Body):
    format: TextFormat | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: bool | None = None  # bytes that hide an event's length: none are sent


# More to tell of an answer: of tools that OpenAI runs, of images, of reasoning that is kept. Nothing of it comes about
# here, but for log-probabilities.
Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
]


class ResponsesBody(StreamBody):
    """Nothing is stored: what needs a store is refused."""

    model: str = ""
    input: str | Many[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    tools: Many[dict[str, Any]] | None = Field(default=None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    include: Many[Include] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_known(self) -> "ResponsesBody":
        self.refuse(SHAPING, "text.format")
        return self

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [tool for tool in self.tools or () if _kind(tool) == "function"]

    def _unknown(self) -> list[str]:
        return super()._unknown() + others(map(_kind, self.tools or ()))

    def chat(self) -> ChatBody:
        """The same as a chat request; Problem 400 for what is not supported."""
        for name in ("previous_response_id", "conversation", "background", "prompt"):
            if getattr(self, name):
                raise Problem(
                    400, f"{name} needs a store, and nothing is stored here: send the whole input", param=name
                )
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            raise Problem(400, "log-probabilities are not told here: ask /v1/chat/completions", param="top_logprobs")
        if self.truncation == "auto":
            raise Problem(400, "truncation auto is not supported: shorten the input", param="truncation")
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        messages += chat_messages(self.input)
        if not messages:
            raise Problem(400, "input is empty: give a text, or at least one item", param="input")
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "tools": [_tool(tool) for tool in self.functions],
            "tool_choice": self._tool_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }
        same = ("seed", "chat_template_kwargs", *SHAPED)
        fields |= {name: getattr(self, name) for name in same}
        return ChatBody.model_validate(fields)

    def _tool_choice(self) -> Any:
        """A name lies one level higher here."""
        if isinstance(self.tool_choice, dict):
            if self.tool_choice.get("type") != "function":
                raise Problem(400, "tool_choice must name a function", param="tool_choice")
            return {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        return self.tool_choice

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return {"type": "json_object"}
        if form.schema_ is None:
            raise Problem(400, "text.format.schema is missing", param="text")
        return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}


def chat_messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input items as messages: an assistant's reasoning, text and calls that follow each other are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    found: list[dict[str, Any]] = []

    def assistant() -> dict[str, Any]:
        if not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": None})
        return found[-1]

    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type") or "message"
        if kind == "message":
            texts = _texts(item.get("content"), where)
            if item.get("role") == "assistant":
                message = assistant()
                message["content"] = (message["content"] or "") + "".join(texts)
            else:
                role = item.get("role")
                found.append({"role": role, "content": content_of(role, texts)})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = content_of("tool", _texts(item.get("output"), where))
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            thought = "".join(_texts(item.get("content") or item.get("summary") or "", where))
            if thought:
                found.append({"role": "assistant", "content": None, "reasoning_content": thought})
        else:
            raise Problem(400, f"{where} is of type {str(kind)[:40]}, which is not supported", param="input")
    return found


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise Problem(400, f"{where} has no content", param="input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = (part.get("text") or part.get("refusal")) if isinstance(part, dict) else None
        if kind not in PARTS or not isinstance(text, str | None):
            raise Problem(400, f"{where} holds {str(kind)[:40]}: only text is read", param="input")
        texts.append(text or "")
    return texts


def _kind(tool: dict[str, Any]) -> Any:
    return tool.get("type", "function")


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function lies one level higher here."""
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
