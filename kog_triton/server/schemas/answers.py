"""What the server answers, as /openapi.json describes it; answers are not built from it. More fields may be there."""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorObject(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorObject


class AnthropicErrorObject(BaseModel):
    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    type: Literal["error"]
    error: AnthropicErrorObject


class Timings(BaseModel):
    """llama.cpp's names. ms, tokens/s, us; MBU from 0 to 1; null where a figure has no meaning."""

    queue_ms: float | None
    cache_n: int
    prompt_n: int
    prompt_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float | None
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    kv_depth: int
    itl_p50_us: float | None
    itl_p99_us: float | None
    mbu: float | None


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    reasoning_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Function(BaseModel):
    name: str
    arguments: str


class Call(BaseModel):
    id: str
    type: Literal["function"]
    function: Function


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] = []


class TokenLogprob(BaseModel):
    token: str | None
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChosenLogprob]
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]


class Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage
    timings: Timings


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]


class Completion(Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ResponsesUsage(BaseModel):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class Item(BaseModel):
    """`type` message, reasoning or function_call, with the fields of each."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: str


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[Item]
    usage: ResponsesUsage
    timings: Timings


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Block(BaseModel):
    type: Literal["text", "thinking", "tool_use"]


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings


class TokenCount(BaseModel):
    input_tokens: int


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class Text(BaseModel):
    prompt: str


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Status(BaseModel):
    status: str


class Version(BaseModel):
    version: str


class Props(BaseModel):
    """Of llama.cpp's fields those that clients ask for, and how this server was opened."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_path: str
    model_alias: str
    chat_template: str | None
    build_info: str
    backend: dict[str, str]
    gpu: str | None
    memory_bytes: dict[str, int]
    slots_running: int = Field(ge=0)
    requests_waiting: int = Field(ge=0)


EVENT = {  # one of a stream
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}


def answers(
    model: type[BaseModel], *, stream: bool = False, anthropic: bool = False
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose answer is such a model, told in events too if it streams."""
    error = AnthropicErrorAnswer if anthropic else ErrorAnswer
    good: dict[str, Any] = {"model": model}
    if stream:
        good["content"] = {"text/event-stream": {"schema": EVENT}}
    return {200: good, "4XX": {"model": error}, "5XX": {"model": error}}
