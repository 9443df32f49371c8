"""POST /v1/completions."""

from pydantic import Field

from kog_triton.server.schemas.sampling import Many, SamplingBody

MAX_PROMPTS = 128
MAX_LOGPROBS = 20


class CompletionBody(SamplingBody):
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: int | None = Field(16, ge=0, lt=1 << 31)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def prompts(self) -> list[str | list[int]]:
        """One or many, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]
