"""In place of a tokenizer where there is none: token ids in, token ids out."""

from collections.abc import Mapping, Sequence
from typing import Any

from kog_triton.errors import RequestError
from kog_triton.text.tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """Whatever needs text is a RequestError that says so; ids decode to no text."""

    def __init__(self) -> None:
        self.named_tokens = {}
        self.chat_templates = {}
        self.special_ids = frozenset()
        self.bos_token_id = self.eos_token_id = None
        self.is_byte_level = True

    @property
    def vocab_size(self) -> int:
        return 0

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        raise _needed("a text prompt")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return ""

    def token_bytes(self, token: int) -> bytes | None:
        raise _needed("structured_outputs")

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        raise _needed("a conversation")

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None, whose: str | None = None, **how: Any
    ) -> list[int]:
        raise _needed("a conversation")


def _needed(what: str) -> RequestError:
    return RequestError(f"{what} needs a tokenizer, and skip_tokenizer_init left it out: send prompt_token_ids")
