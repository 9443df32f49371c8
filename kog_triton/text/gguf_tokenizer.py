"""A tokenizer out of a GGUF file's metadata, with the same ids as the checkpoint's tokenizer.json.

    tokenizer.ggml.model    "gpt2": byte-level BPE, split as tokenizer.ggml.pre says; "llama": SentencePiece's BPE
    tokenizer.ggml.tokens   by id; token_type: 2 unknown, 3 control, 4 user defined, 6 byte, others plain
    tokenizer.ggml.merges   "a b", the first one first; for "llama" they follow from the scores

A file stores how text is split as a name alone: names that are not known here are refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kog_triton.errors import ModelError, printable, shown
from kog_triton.text import chat
from kog_triton.text.sandbox import RENDERER
from kog_triton.text.tokenizer import Tokenizer, library_errors
from kog_triton.text.tokenizer_growth import check_growth

MAX_TOKENS = 1 << 22
MAX_TOKEN = 1 << 10  # characters
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"  # the default one; others have .NAME behind it
# Regular expressions of the families' tokenizer.json files.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_GPT2_NAMES = ("gpt-2", "smollm")  # ByteLevel's own expression; smollm also splits digits


class _Fields:
    """The metadata under tokenizer.ggml., typed."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(_PREFIX + name)
        if value is None:
            return default
        if type(value) is not kind:
            raise ModelError(f"{_PREFIX}{name} is {shown(value)}: it must be a {kind.__name__}")
        return value

    def items(self, name: str, kind: type, count: int | None) -> list[Any]:
        values = self.get(name, list, [])
        if any(type(v) is not kind for v in values) or (count is not None and len(values) != count):
            wanted = "" if count is None else f"{count} "
            raise ModelError(f"{_PREFIX}{name} must be a list of {wanted}{kind.__name__}")
        return values


def tokenizer_of_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that a file's metadata describe; ModelError, which names the field, for what is not known."""
    try:
        return _build(metadata, path)
    except ModelError as error:
        text = str(error)
        raise ModelError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _build(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    fields = _Fields(metadata)
    model = fields.get("model", str, "")
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{_PREFIX}model is {shown(model)}: it must be 'gpt2' or 'llama'")
    tokens = fields.items("tokens", str, None)
    if not 0 < len(tokens) <= MAX_TOKENS or len(set(tokens)) != len(tokens):
        raise ModelError(f"{_PREFIX}tokens has {len(tokens)} tokens: they must differ")
    if max(map(len, tokens)) > MAX_TOKEN:
        raise ModelError(f"{_PREFIX}tokens has a token of more than {MAX_TOKEN} characters")
    types = fields.items("token_type", int, len(tokens) if fields.get("token_type", list) else None)
    named = {}
    for name, field in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        number = fields.get(field, int)
        if number is not None:
            if not 0 <= number < len(tokens):
                raise ModelError(f"{_PREFIX}{field} is {number}: there are {len(tokens)} tokens")
            named[name] = tokens[number]
    with library_errors(f"{path}: not a readable tokenizer"):
        make = _byte_level if model == "gpt2" else _sentencepiece
        backend, begins = make(fields, tokens, named.get("unk_token"))
        special = {_CONTROL} | ({_UNKNOWN} if model == "llama" else set())
        for kinds, is_special in ((special, True), ({_USER_DEFINED}, False)):
            added = [t for t, kind in zip(tokens, types, strict=False) if kind in kinds and t]
            backend.add_tokens([tokenizers.AddedToken(t, special=is_special, normalized=False) for t in added])
        _add_ends(backend, fields, named, begins)
        check_growth(backend, path)
    templates = {}
    for field, template in metadata.items():
        if field != _TEMPLATE and not field.startswith(f"{_TEMPLATE}."):
            continue
        if not isinstance(template, str):
            raise ModelError(f"{printable(field)[:80]} is no text")
        name = field.removeprefix(_TEMPLATE).removeprefix(".") or "default"
        chat.check_template(path, name, template)
        templates[name] = template
    if templates:
        RENDERER.start()  # ready when the weights are
    return Tokenizer(backend, named, templates)


def _byte_level(fields: _Fields, tokens: list[str], unknown: str | None) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether a text begins with bos unless the file says otherwise."""
    pre = fields.get("pre", str, "")
    if pre not in (*_SPLITS, *_GPT2_NAMES):
        known = ", ".join((*_SPLITS, *_GPT2_NAMES))
        raise ModelError(f"{_PREFIX}pre is {shown(pre)}: it must be one of {known}")
    pairs = [tuple(merge.split(" ")) for merge in fields.items("merges", str, None)]
    if any(len(pair) != 2 for pair in pairs):
        raise ModelError(f"{_PREFIX}merges must be a list of pairs, each with one space between")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    whole_first = pre in _LLAMA3_NAMES  # a word that is a token is not merged from its parts
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_first)  # type: ignore[arg-type]
    )
    if pre in _SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tokenizers.Regex(_SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        parts: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if pre == "smollm":
            parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
        backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if _SPLITS.get(pre) is _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, whole_first


def _sentencepiece(fields: _Fields, tokens: list[str], unknown: str | None) -> tuple[tokenizers.Tokenizer, bool]:
    scores = fields.items("scores", float, len(tokens))
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=_merges(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = fields.get("add_space_prefix", bool, True)
    spaces: list[Any] = [normalizers.Replace(" ", "\u2581")]
    back: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        spaces.insert(0, normalizers.Prepend("\u2581"))
        back.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(back)
    return backend, True


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token: first what makes the one with the best score."""
    found = []
    for token, i in vocabulary.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[i], -len(left), -len(right), left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _add_ends(backend: tokenizers.Tokenizer, fields: _Fields, named: Mapping[str, str], begins: bool) -> None:
    """bos before a text and eos behind it, where the file asks for them."""
    bos = fields.get("add_bos_token", bool, begins and "bos_token" in named)
    eos = fields.get("add_eos_token", bool, False)
    if (bos and "bos_token" not in named) or (eos and "eos_token" not in named):
        raise ModelError(f"{_PREFIX}add_bos_token or add_eos_token is true without such a token")
    ends = {name: named[name] for name, on in (("bos_token", bos), ("eos_token", eos)) if on}
    if not ends:
        return
    ids = [(text, backend.token_to_id(text)) for text in dict.fromkeys(ends.values())]
    first, last = ends.get("bos_token"), ends.get("eos_token")
    single = [t for t in (first, "$A", last) if t is not None]
    pair = [*single, *(t + ":1" if t == "$A" else t for t in single)]
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=["$B:1" if t == "$A:1" else t for t in pair], special_tokens=ids
    )
