"""Incremental detokenization: token ids in, text deltas out, each as soon as it is certain.

The deltas and the last one, from `finish`, join to exactly what decoding all ids at once gives.
A character is never split: its bytes wait until it is whole, and bytes that never become a
character come out as U+FFFD. The cost per token does not grow with the text.

    byte-level vocabularies   every id is a string of bytes; an incremental UTF-8 decoder joins them
    all others                a token is decoded after the one before it, which settles whether it
                              gets a leading space; the library decodes a run of byte tokens
                              (<0x..>) as a whole, so a run waits for its end

tokenizers' own DecodeStream (0.23.3) would not do: it cannot be flushed, so that a text that ends inside a character
loses its end, and among random ids it raises (tests/host/test_text_detokenize.py keeps both).
"""

import codecs
from collections.abc import Iterable

from kog_triton.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence of ids into text, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream: _Bytes | _Pieces
        self._stream = _Bytes(tokenizer) if tokenizer.is_byte_level else _Pieces(tokenizer)

    def feed(self, ids: int | Iterable[int]) -> str:
        """The text that these ids, one or several, make certain."""
        ids = (ids,) if isinstance(ids, int) else ids
        return "".join([self._stream.feed(i) for i in ids if i not in self._skip])

    def finish(self) -> str:
        """The rest, once no more ids come."""
        return self._stream.finish()


class _Bytes:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(self._bytes_of(token) or b"")

    def finish(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class _Pieces:
    """`context` + `pending` is what gets decoded; `shown` is the text of `context`, already out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = []  # enough ids to have text: what follows is not at the start
        self._context: list[int] = []  # the anchor and, if it is another one, the last id
        self._shown = ""
        self._pending: list[int] = []

    def feed(self, token: int) -> str:
        if self._tokenizer.token_bytes(token) is None:  # an unknown id decodes to nothing
            return ""
        self._pending.append(token)
        if self._tokenizer.is_byte_token(token):
            return ""
        return self._emit()

    def _emit(self) -> str:
        ids = self._context + self._pending
        text = self._decode(ids)
        delta = text[len(self._shown) :]
        last = ids[-1]
        alone = self._decode([last])
        if alone:
            self._anchor = [last]
            self._context, self._shown = self._anchor, alone
        elif self._anchor:
            self._context = [*self._anchor, last]
            self._shown = self._decode(self._context)
        else:
            self._context, self._shown = ids, text
            self._anchor = ids if text else []
        self._pending = []
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def finish(self) -> str:
        return self._emit() if self._pending else ""
