"""Grammars as token masks: llguidance decides which tokens may come next.

    Grammars(tokenizer, vocab_size, eos ids)    one a model; llguidance is imported on first use
      .compile("regex", "[0-9]+") -> Grammar    checked, or a RequestError that names it
        .mask() -> MaskHook                     the state of one sample, fed token by token

A token counts as the bytes of `Tokenizer.token_bytes`, a special token as no text at all. An end
token is allowed exactly where the grammar is complete, and nothing else once it cannot go on.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kog_triton.errors import RequestError, RunError, shown
from kog_triton.text.sandbox import CHECKER
from kog_triton.text.stop import overlap
from kog_triton.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

SILENT = 0  # llguidance's log level: what is wrong comes back as an error
# within a line: white space that may run over lines is searched with the square of their number
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
MAX_GBNF_CHARS = 1 << 14  # llguidance's conversion of 98 KB took 38 s, with the square of the rules
# between two tokens of JSON: enough to indent by, too little to stay there until the context is full
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,32}"


class Grammars:
    """Compiles constraints for one model's vocabulary of `vocab_size` ids."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(i for i in eos_token_ids if i < vocab_size)
        self._free: Free | None = None  # the last one

    def compile(self, name: str, value: Any, behind: str | None = None) -> "Grammar":
        """The grammar of one field of StructuredOutputsParams, which begins `behind` a text of the answer.

        RequestError if llguidance is not installed, the model has no end token, or the constraint
        is invalid or admits no answer.
        """
        source = _checked_source(name, value)
        from llguidance import LLMatcher

        if not self._eos:
            raise RequestError("structured_outputs needs a model with an end token: this one could not stop")
        matcher = LLMatcher(self._vocabulary, source, log_level=SILENT)
        if matcher.is_error():
            raise _invalid(name, value, matcher.get_error())
        matcher.compute_bitmask()
        if matcher.is_error():
            raise _invalid(name, value, f"it admits no answer: {matcher.get_error()}")
        free = None
        if behind is not None:
            free, marker = self._free, behind.encode()
            if free is None or free.marker != marker:  # a server has one
                free = self._free = Free(marker, self._tokenizer, self._words_until(marker))
        return Grammar(matcher, self._vocab_size, free)

    def _words_until(self, marker: bytes) -> np.ndarray:
        bits = np.zeros((len(marker), -(-self._vocab_size // 32) * 32), np.uint8)
        bits[:, : self._vocab_size] = 1
        bits[:, self._eos] = 0
        for token in range(min(self._vocab_size, self._tokenizer.vocab_size)):
            said = self._tokenizer.token_bytes(token) or b""
            if marker[-1:] in said:  # few do
                for begun in range(len(marker)):
                    more = (marker[:begun] + said).partition(marker)[2]
                    bits[begun, token] &= not more.strip()
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)

    @cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        table = _TokenTable(self._tokenizer, self._vocab_size, self._eos)
        return LLTokenizer(TokenizerWrapper(table), n_vocab=self._vocab_size, eos_token=self._eos)


def check_constraint(name: str, value: Any) -> None:
    """What can be said of a constraint before any vocabulary is known: the same RequestErrors."""
    source = _checked_source(name, value)
    from llguidance import LLMatcher

    if wrong := LLMatcher.validate_grammar(source):
        raise _invalid(name, value, wrong)


def try_constraint(name: str, value: Any) -> None:
    """As `check_constraint` for what a stranger sent: in a limited process, so that time, memory and a stack that
    llguidance would overrun are that process's. The RequestError says which."""
    if wrong := fault_of(name, value):
        raise _invalid(name, value, wrong)


def fault_of(name: str, value: Any) -> str:
    """What `try_constraint` finds, "" if nothing: a line, without the constraint's own name."""
    wrong = CHECKER.check(_checked_source(name, value))
    return _first_line(wrong) if wrong else ""


def _checked_source(name: str, value: Any) -> str:
    """RequestError if llguidance is not installed or the constraint is no text of its kind."""
    if find_spec("llguidance") is None:
        raise RequestError("structured_outputs needs llguidance: pip install 'kog-triton[grammar]'")
    try:
        return _source(name, value)
    except UnicodeEncodeError as error:
        raise _invalid(name, value, "it holds a lone surrogate") from error


class Free(NamedTuple):
    """What a sample may say until the grammar begins: `words` allow it, up to the end of `marker`.

    No token ends the marker and says more, but white space: it would be no part of the shape.
    """

    marker: bytes
    tokenizer: Tokenizer
    words: np.ndarray  # uint32 [bytes of the marker that were said last, ceil(vocab / 32)]


class Grammar:
    """A compiled constraint. Samples share it, each with a state of its own."""

    def __init__(self, matcher: "llguidance.LLMatcher", vocab_size: int, free: Free | None = None) -> None:
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._free = free

    def mask(self) -> "Mask | MaskBehind":
        """A mask hook for one sample, at its first token."""
        mask = Mask(self._matcher.deep_copy(), self._num_words)
        return mask if self._free is None else MaskBehind(mask, self._free)


class Mask:
    """The mask hook of one sample: only the ids that are new since the last call are fed."""

    def __init__(self, matcher: "llguidance.LLMatcher", num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words
        self._num_fed = 0

    def __call__(self, output_ids: Sequence[int]) -> np.ndarray:
        """Allowed ids after `output_ids`: uint32 [ceil(vocab / 32)].

        RunError if an id was not allowed where it stands; RequestError if the grammar grew beyond
        llguidance's limits.
        """
        for token in output_ids[self._num_fed :]:
            if not self._matcher.try_consume_tokens([token]):
                self._check_limits()
                raise RunError(f"the grammar refused token {token}")
            self._num_fed += 1
        words = np.zeros(self._num_words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check_limits()
        return words

    def _check_limits(self) -> None:
        if self._matcher.is_error():
            why = _first_line(self._matcher.get_error())
            raise RequestError(f"structured_outputs is too complex after {self._num_fed} tokens, simplify it: {why}")


class MaskBehind:
    """The mask hook of one sample whose grammar begins with the token behind a marker, which may be several tokens."""

    def __init__(self, mask: Mask, free: Free) -> None:
        self._mask, self._free = mask, free
        self._num_seen, self._tail = 0, b""
        self._first: int | None = None  # of the tokens that the grammar shapes

    def __call__(self, output_ids: Sequence[int]) -> np.ndarray:
        """As `Mask`."""
        for token in output_ids[self._num_seen :] if self._first is None else ():
            self._num_seen += 1
            seen = self._tail + (self._free.tokenizer.token_bytes(token) or b"")
            if self._free.marker in seen:
                self._first = self._num_seen
                break
            self._tail = seen[-len(self._free.marker) :]
        if self._first is None:
            return self._free.words[overlap(self._tail, self._free.marker)]
        return self._mask(output_ids[self._first :])


class _TokenTable:
    """The vocabulary as llguidance reads one: bytes by id, empty for an id that is not in use."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: Sequence[int]) -> None:
        ids = range(min(vocab_size, tokenizer.vocab_size))
        used = [tokenizer.token_bytes(i) or b"" for i in ids]
        self.tokens = used + [b""] * (vocab_size - len(used))
        special = tokenizer.special_ids | set(eos)
        self.special_token_ids = sorted(i for i in special if i < vocab_size)
        self.eos_token_id = eos[0]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:  # with bytes it fails, and gets text from then on
        return self._tokenizer.encode(text, add_special_tokens=False)


def _source(name: str, value: Any) -> str:
    """A constraint in llguidance's own form."""
    from llguidance import LLMatcher

    if name == "regex":
        return LLMatcher.grammar_from_regex(value)
    if name == "grammar":
        return LLMatcher.grammar_from_lark(_lark_of(value))
    if name == "choice":  # a Lark string is written as a JSON string
        texts = (json.dumps(text) for text in value)
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(texts)}")
    schema = {"type": "object"} if name == "json_object" else value
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _invalid(name, value, f"not JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise _invalid(name, value, "a JSON schema is an object")
    try:
        text = json.dumps(schema)
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": JSON_SPACE})
    except (TypeError, ValueError, RecursionError) as error:
        raise _invalid(name, value, str(error)) from error


def _lark_of(text: str) -> str:
    """A grammar in Lark's syntax, or in that of GBNF, which vLLM and llama.cpp take."""
    if GBNF_RULE.search(text) is None:
        return text
    if len(text) > MAX_GBNF_CHARS:
        most = f"longer than {MAX_GBNF_CHARS} characters, the most of GBNF: write it as Lark"
        raise _invalid("grammar", text, most)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # its own error derives from nothing narrower; deep nesting is Python's
        raise _invalid("grammar", text, str(error)) from error


def _invalid(name: str, value: Any, why: str) -> RequestError:
    said = " ".join(value[:80].split()) if isinstance(value, str) else shown(value)
    return RequestError(f"structured_outputs.{name} {said!r} is invalid: {_first_line(why)}")


def _first_line(message: str) -> str:
    """The message on one line, without the drawing of the place below it."""
    lines = [line.strip() for line in message.strip().splitlines()]
    reason = next((line for line in lines if line.startswith("error: ")), "")
    return f"{lines[0]} {reason}".strip() if lines else "no reason was given"
