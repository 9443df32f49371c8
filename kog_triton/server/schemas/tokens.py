"""POST /tokenize and /detokenize."""

from typing import Any

from pydantic import Field

from kog_triton.server.schemas.chat import MAX_MESSAGES, Message, Tool
from kog_triton.server.schemas.sampling import Body, Many


class TokenizeBody(Body):
    """A text, or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: Many[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: Many[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str = ""
    tokens: Many[int]
