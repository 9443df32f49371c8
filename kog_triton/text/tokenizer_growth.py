"""How much longer a tokenizer.json may make a text, refused before the first text.

A normalizer that replaces "a" by "aa" forty times in a row, or a post-processor that puts a text
into its own result again and again, makes terabytes of one letter, inside a library that ends the
process when memory does. Each step of one is a line: n characters become at most
times * n + plus of them; steps in a row are lines put into lines.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from kog_triton.errors import ModelError

# A Unicode normalization with a few patterns behind it stays below a tenth of the first; Unicode's
# own longest is 18.
MAX_TIMES, MAX_PLUS = 1 << 10, 1 << 16


def check_growth(backend: tokenizers.Tokenizer, path: Path) -> None:
    """ModelError if the tokenizer in the file `path` can make a text too much longer."""
    for name in ("normalizer", "decoder", "post_processor"):
        part = getattr(backend, name)
        if part is None:
            continue
        times, plus = _line(json.loads(part.__getstate__()))
        if times > MAX_TIMES or plus > MAX_PLUS:
            raise ModelError(
                f"{path}: its {name} makes a text of n characters up to {_round(times)} * n + "
                f"{_round(plus)} long, more than {MAX_TIMES} * n + {MAX_PLUS}: it is not loaded"
            )


def _line(step: Mapping[str, Any]) -> tuple[float, float]:
    """(times, plus) of one step or of a sequence of them."""
    kind = step["type"]
    if kind == "Sequence":
        inner = next(step[n] for n in ("normalizers", "decoders", "processors") if n in step)
        times, plus = 1.0, 0.0
        for t, p in map(_line, inner):
            times, plus = t * times, t * plus + p
        return times, plus
    if kind == "Replace":
        return _replace(step["pattern"], len(step["content"]))
    if kind == "Prepend":
        return 1.0, len(step["prepend"])
    if kind == "Precompiled":
        return float(_longest(step["precompiled_charsmap"])), 0.0
    if kind == "TemplateProcessing":
        ids = {name: len(token["ids"]) for name, token in step["special_tokens"].items()}
        named = [piece.get("SpecialToken") for piece in step["single"]]
        added = sum(ids.get(special["id"], 1) for special in named if special)
        return float(named.count(None)), added
    return 1.0, 0.0


def _replace(pattern: Mapping[str, str], length: int) -> tuple[float, float]:
    """A text is replaced where it stands, a regular expression perhaps between all characters."""
    text = pattern.get("String")
    if text:
        return max(1.0, length / len(text)), 0.0
    return 1.0 + length, length


def _longest(charsmap: str) -> int:
    """The longest replacement in SentencePiece's map: a trie, its size before it, and the texts."""
    data = base64.b64decode(charsmap)
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _round(number: float) -> str:
    return f"{number:.3g}"
