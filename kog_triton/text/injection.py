"""Keeps special tokens out of a user's reach: "<|im_end|>" typed by a user is plain text.

    mark    before rendering: a mark character goes into every string of the conversation wherever
            the text of a special token begins in it, after that token's first character; and at the
            ends of a string that could make up such a text together with what stands next to it
    render  the template writes its own special tokens, which have no mark inside
    reveal  every special token without a mark is the template's: it gets a secret prefix; then the
            marks go, and a twin of the tokenizer encodes, whose special tokens are spelled with the
            secret prefix and have the same ids. What a user typed is none of them any more.

Without special text in the conversation nothing is marked and the plain tokenizer is used, unless a
special token is matched after normalization, where what was typed may look different. Guarded
are the tokens that the tokenizer calls special; <think>, <tool_call> and others that many models
add as ordinary tokens stay tokens, since clients send them back in past answers. A special token of
a single character cannot be split by a mark and is not guarded; nor is one that the template itself
makes up, by cutting pieces out of what was typed or by changing its letter case.

tokenizers' own `encode_special_tokens` would not do: it keeps added tokens from being matched, but where a
special token is a piece of the model's vocabulary too, as SentencePiece's "</s>" is, the model itself makes the
token of what was typed (tests/host/test_text_chat.py keeps that); and it knows nothing of the template's own.
"""

import json
import re
import secrets
from functools import cached_property
from typing import Any

import tokenizers

from kog_triton.errors import ModelError

# Unicode noncharacters, set aside for internal use: no text needs them
MARK, SECRET = "\ufdd0", "\ufdd1"
PLAIN_WORD = re.compile(r"[\w-]*")


class Guard:
    """Marks conversations and encodes what the template made of them, for one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        specials = [t for t in backend.get_added_tokens_decoder().values() if t.special]
        specials = [t for t in specials if len(t.content) > 1]
        self._texts = sorted({t.content for t in specials}, key=len, reverse=True)
        # the longest first, as the tokenizer matches; (?!) is what never matches
        any_special = "|".join(map(re.escape, self._texts)) or "(?!)"
        # tokens that are matched after normalization can be typed in other letters: always the twin
        self.loose = backend.normalizer is not None and any(t.normalized for t in specials)
        self._begins = re.compile(f"(?={any_special}).", re.DOTALL)
        self._special = re.compile(any_special)
        self._heads = tuple({t[:i] for t in self._texts for i in range(1, len(t))})
        self._tails = tuple({t[i:] for t in self._texts for i in range(1, len(t))})
        self._secret = SECRET + secrets.token_hex(8)

    def mark(self, value: Any) -> Any:
        """JSON data with marks in its strings; equal to `value` if none was needed."""
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        return value

    def _mark_text(self, text: str) -> str:
        marked = self._begins.sub(rf"\g<0>{MARK}", text.replace(MARK, ""))  # ours alone to place
        if PLAIN_WORD.fullmatch(marked):  # a role, name or type: not the edge of a token
            return marked
        # templates trim: what matters is the first and the last character that is no space
        end = len(marked.rstrip())
        if marked[:end].endswith(self._heads):
            marked = marked[:end] + MARK + marked[end:]
        start = len(marked) - len(marked.lstrip())
        if marked[start:].startswith(self._tails):
            marked = marked[:start] + MARK + marked[start:]
        return marked

    def reveal(self, rendered: str) -> str:
        """A rendered conversation without marks, its special tokens spelled for `twin`."""
        text = self._special.sub(rf"{self._secret}\g<0>", rendered)
        escaped = f"\\u{ord(MARK):04x}"  # as JSON in ASCII has it
        return text.replace(MARK, "").replace(escaped, "")

    @cached_property
    def twin(self) -> tokenizers.Tokenizer:
        """The tokenizer with the secret prefix before the text of each special token."""
        data = json.loads(self._backend.to_str())
        texts = set(self._texts)

        def rename(token: str) -> str:
            return self._secret + token if token in texts else token

        for token in data["added_tokens"]:
            if token["special"]:
                token["content"] = rename(token["content"])
        model = data["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {rename(piece): i for piece, i in model["vocab"].items()}
        else:
            model["vocab"] = [[rename(piece), score] for piece, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = rename(model["unk_token"])
        # merges that make up a special token would let plain text become it
        merges = model.get("merges") or []
        pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in merges]
        kept = [m for m, pair in zip(merges, pairs, strict=True) if not texts & {*pair, "".join(pair)}]
        if "merges" in model:
            model["merges"] = kept
        data["post_processor"] = None
        twin = tokenizers.Tokenizer.from_str(json.dumps(data))
        for text in self._texts:
            if twin.token_to_id(rename(text)) != self._backend.token_to_id(text):
                raise ModelError(f"tokenizer.json gives {text!r} an id out of order: save it again")
        return twin
