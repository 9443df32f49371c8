"""A checkpoint's tokenizer: text to ids and back, special tokens, chat.

Reads tokenizer.json, and beside it tokenizer_config.json, special_tokens_map.json and chat
templates where they exist, with the same result as transformers. A file that is missing or broken
is a ModelError with its path. Sentencepiece-only checkpoints are refused with advice.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kog_triton.errors import KogError, ModelError, RequestError, TooLong, first_line, is_failure
from kog_triton.json_file import read_json
from kog_triton.text import chat
from kog_triton.text.content import formatted
from kog_triton.text.injection import Guard
from kog_triton.text.kept_ids import KeptIds
from kog_triton.text.sandbox import RENDERER
from kog_triton.text.tokenizer_growth import check_growth
from kog_triton.text.tokenizer_merges import check_merges

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
OTHER_FORMATS = ("tokenizer.model", "spiece.model", "tekken.json", "tiktoken.model", "vocab.json")
MAX_TOKENIZER_BYTES = 256 << 20  # of tokenizer.json; the largest in use have an eighth of it
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Encodes and decodes as the checkpoint's own tokenizer does; safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.named_tokens = dict(named_tokens or {})
        self.chat_templates = dict(templates or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        steps = _decoder_steps(backend)
        self.is_byte_level = steps == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in steps
        self._bytes: dict[int, bytes | None] = {}

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a checkpoint folder."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            other = next((name for name in OTHER_FORMATS if (folder / name).is_file()), None)
            if other is None:
                raise ModelError(f"{path} does not exist: the checkpoint has no tokenizer")
            raise ModelError(
                f"{path} does not exist and {other} is not read: convert it once with "
                "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ModelError(f"{path} is larger than {MAX_TOKENIZER_BYTES >> 20} MiB")
        data = path.read_bytes()  # a path may be no UTF-8
        check_merges(data, path)
        with library_errors(f"{path} is not a readable tokenizer"):
            backend = tokenizers.Tokenizer.from_buffer(data)
            check_growth(backend, path)
        config = _read_optional(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_optional(folder / "special_tokens_map.json")
        templates = chat.load_templates(folder, config)
        if templates:
            RENDERER.start()  # ready when the weights are
        named = {name: text_of(config[name]) for name in NAMED_TOKENS if config.get(name)}
        _add_configured(backend, config, named, folder / "tokenizer_config.json")
        return cls(backend, named, templates)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, of which `load` makes the same tokenizer."""
        self._backend.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = dict(self.named_tokens)
        if self.chat_templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self.chat_templates.items()]
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _id_of(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included; a model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Ids of a text; special tokens written in it are special (`encode_chat` is for users).

        `add_special_tokens` adds what tokenizer.json puts around a text, often a first token. `most` is the context's
        tokens: RequestError for a text that begins with far more, without a look at the rest of it.
        """
        return _encode(self._backend, text, add_special_tokens, most)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        with library_errors("tokenizer.json cannot decode"):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes | None:
        """The bytes that an id stands for inside a text, None for an id that is not in use.

        For word pieces these are the piece's own characters, without the space between words.
        """
        if token not in self._bytes:
            self._bytes[token] = self._find_bytes(token)
        return self._bytes[token]

    def _find_bytes(self, token: int) -> bytes | None:
        piece = self._backend.id_to_token(token)
        if piece is None:
            return None
        if self.is_byte_level:
            values = [BYTE_OF.get(character) for character in piece]
            known = [v for v in values if v is not None]
            # an added token may hold characters that stand for no byte: then it is plain text
            return bytes(known) if len(known) == len(values) else piece.encode()
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()

    def is_byte_token(self, token: int) -> bool:
        """Whether an id is one raw byte that text falls back to, in the vocabulary as <0x..>."""
        piece = self._backend.id_to_token(token)
        return self._byte_fallback and piece is not None and bool(BYTE_TOKEN.fullmatch(piece))

    # ---- chat ----

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """The conversation as the model's template writes it; the parameters are those of `encode_chat`.

        To make ids of it use `encode_chat`: in this text a user's "<|im_end|>" looks real.
        """
        return self._conversation(messages, **how).render(self.named_tokens)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], most: int | None = None, whose: str | None = None, **how: Any
    ) -> list[int]:
        """The ids of `render_chat`, in which special tokens come from the template alone.

        tools, documents         what the model may call and read, as JSON data
        add_generation_prompt    end with what begins an answer (default: True)
        continue_final_message   end inside the last message, for the model to continue it
        template                 the name of one of several templates of the checkpoint
        chat_template            a template's text, instead of the checkpoint's
        content_format           "string", "openai" or "auto", as in LLM.chat (default: as it is given)
        most                     as in `encode`
        whose                    what a conversation of this name began with before is not encoded again

        Others are the template's own, such as enable_thinking. RequestError for a conversation that the template
        refuses.
        """
        plain = self._conversation(messages, **how)
        marked = replace(plain, values=self._guard.mark(plain.values))
        text = marked.render(self.named_tokens)
        guarded = marked != plain or self._guard.loose
        text = self._guard.reveal(text) if guarded else text
        backend = self._guard.twin if guarded else self._backend
        if whose is None:
            return _encode(backend, text, False, most)
        with _text_errors():
            _check_length(backend, text, most)
            return (self._kept_twin if guarded else self._kept).encode(text, whose)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **how: Any,
    ) -> list[int] | str:
        """`encode_chat`, or `render_chat` without `tokenize`, under the name and defaults of transformers.

        RequestError for what transformers does besides, such as return_tensors: no template sees it.
        """
        for name in ("return_tensors", "return_dict", "padding", "truncation", "max_length"):
            if how.pop(name, None):
                raise RequestError(f"apply_chat_template gives a list of ids: leave out {name}")
        how |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        return self.encode_chat(conversation, **how) if tokenize else self.render_chat(conversation, **how)

    def _conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        chat_template: str | None = None,
        content_format: str | None = None,
        **kwargs: Any,
    ) -> chat.Conversation:
        if chat_template is not None:
            source = chat.caller_template(chat_template)
        else:
            source = chat.choose_template(self.chat_templates, template, tools is not None)
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message needs add_generation_prompt=False: the answer has begun")
        ends = "with_prompt" if add_generation_prompt else "as_is"
        if continue_final_message:
            ends = "inside"
        values = chat.prepare(messages, tools, documents, kwargs)
        if content_format is not None:
            values["messages"] = formatted(values["messages"], content_format, source)
        return chat.Conversation(source, values, ends, chat_template is not None)

    @cached_property
    def _guard(self) -> Guard:
        return Guard(self._backend)

    @cached_property
    def _kept(self) -> KeptIds:
        return KeptIds(self._backend)

    @cached_property
    def _kept_twin(self) -> KeptIds:
        return KeptIds(self._guard.twin)


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, most: int | None) -> list[int]:
    with _text_errors():
        _check_length(backend, text, most)
        return backend.encode(text, add_special_tokens=add_special_tokens).ids


@contextlib.contextmanager
def _text_errors() -> Iterator[None]:
    """RequestError for a text that no tokenizer takes."""
    with library_errors("tokenizer.json cannot encode this text"):
        try:
            yield
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("the text is not valid Unicode: it holds a lone surrogate") from error


def _check_length(backend: tokenizers.Tokenizer, text: str, most: int | None) -> None:
    """TooLong if a beginning of the text has more than twice `most` tokens; None: any number may be.

    Twice, because where a text is cut off its last word may have more tokens than inside the whole. Beginnings grow
    from eight characters a token, beyond which few texts reach.
    """
    if most is None:
        return
    size = 8 * most
    while size < len(text):
        tokens = len(backend.encode(text[:size], add_special_tokens=False).ids)
        if tokens > 2 * most:
            raise TooLong(
                f"the prompt has more than {tokens // 2} tokens and the context holds {most}: "
                "shorten the prompt to leave room for an answer"
            )
        size *= 2


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Whatever the tokenizers library raises inside, as a ModelError that begins with `what`."""
    try:
        yield
    except KogError:
        raise
    except BaseException as error:
        if is_failure(error):  # it raises bare Exception
            raise ModelError(f"{what}: {first_line(error)}") from error
        raise


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[str]:
    """Types of the decoder's steps in order; empty if there is no decoder."""

    def steps(decoder: Mapping[str, Any]) -> list[str]:
        if decoder["type"] != "Sequence":
            return [decoder["type"]]
        return [step for inner in decoder["decoders"] for step in steps(inner)]

    return steps(json.loads(backend.decoder.__getstate__())) if backend.decoder else []


def _add_configured(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str], path: Path
) -> None:
    """Add the tokens that only tokenizer_config.json has, or has with other flags."""
    have = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    try:
        listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda e: int(e[0]))
        tokens = [
            tokenizers.AddedToken(**{k: v for k, v in fields.items() if k in TOKEN_FIELDS}) for _, fields in listed
        ]
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: added_tokens_decoder is not a table of tokens by id") from error
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    texts = [*named.values(), *(map(text_of, extra) if isinstance(extra, list) else ())]
    with library_errors(f"{path} has a token that cannot be added"):
        backend.add_tokens([token for token in tokens if repr(token) not in have])
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        missing = [t for t in dict.fromkeys(texts) if t not in known]
        special = [tokenizers.AddedToken(t, special=True, normalized=False) for t in missing]
        backend.add_tokens(special)


def text_of(token: Any) -> str:
    """A token in a configuration is text or an object with the text as "content"."""
    return str(token["content"]) if isinstance(token, Mapping) and "content" in token else str(token)


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _byte_characters() -> dict[str, int]:
    """Byte-level vocabularies write bytes as characters: printable Latin-1 as itself, the other
    bytes, in order, as the characters from U+0100 on (the GPT-2 convention)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_characters()
