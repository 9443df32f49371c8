"""What tries grammars in a limited process (limited_process.py): {"grammar": ...} to {} or {"error": ...}.

`grammar` is in llguidance's own form. It is compiled for a vocabulary of bytes and asked for its first mask: the work
that an engine does for its own vocabulary.
"""

from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

SILENT = 0  # llguidance's log level
END = 256


class Bytes:
    """A token a byte, and an end token, as llguidance reads a vocabulary."""

    bos_token_id = None
    eos_token_id = END
    special_token_ids = (END,)
    tokens = (*(bytes([i]) for i in range(END)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


VOCABULARY = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=END + 1, eos_token=END)


def answer(request: dict[str, Any], max_chars: int) -> dict[str, Any]:
    """What is wrong with a grammar, if anything is."""
    matcher = LLMatcher(VOCABULARY, request["grammar"], log_level=SILENT)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"error": matcher.get_error()[:max_chars]} if matcher.is_error() else {}
