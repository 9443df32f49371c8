"""What a caller may ask of sampling: vLLM's names and meanings, validated when built.

A value out of range is a one-line RequestError that names field, value and range. Three things are
not the caller's to know, so `resolve` adds them once per request: a seed if none was given, the ids
that end the sequence, and the bad words as token ids. `sample` wants resolved parameters.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kog_triton.errors import RequestError
from kog_triton.sampling.structured import StructuredOutputs

MIN_TEMPERATURE = 1e-5  # below it 1 / temperature only loses range: use 0, which is greedy
MAX_TEMPERATURE = 1e5
MAX_VOCAB_SIZE = 1 << 20  # weights of at most 2^40 then add up to less than 2^63

# generation_config.json key -> field; other keys there do not concern sampling
GENERATION_CONFIG_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling. `temperature` 0 is greedy and ignores top_k, top_p and min_p."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: `resolve` draws one
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None  # kept as a tuple
    stop_token_ids: Collection[int] | None = None  # kept as a tuple
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Collection[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = (
        None  # None: none; k: the token's and the k best; -1: the whole vocabulary
    )
    prompt_logprobs: int | None = None  # as logprobs, for every token of the prompt
    detokenize: bool = True
    structured_outputs: StructuredOutputs | None = None
    end_token_ids: tuple[int, ...] = ()  # from `resolve`: masked until min_tokens are out
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # from `resolve`

    def __post_init__(self) -> None:
        _integer("n", self.n, 1)
        _real("temperature", self.temperature, 0, MAX_TEMPERATURE)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise _wrong("temperature", self.temperature, f"0 (greedy) or >= {MIN_TEMPERATURE:g}")
        if self.n > 1 and self.greedy:
            raise _wrong("n", self.n, "1 when temperature is 0: greedy samples are all the same")
        _real("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise _wrong("top_p", self.top_p, "above 0 and at most 1")
        _integer("top_k", self.top_k, -1)
        _real("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        _real("repetition_penalty", self.repetition_penalty, 0, 1e6)
        if self.repetition_penalty == 0:
            raise _wrong("repetition_penalty", self.repetition_penalty, "above 0")
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1)
        for name in (
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        self._set_strings("stop")
        self._set_strings("bad_words")
        if self.stop and not self.detokenize:
            raise _wrong("detokenize", self.detokenize, "true when stop strings are given")
        self._set_ids("stop_token_ids")
        self._set_ids("allowed_token_ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _wrong("allowed_token_ids", [], "null or at least one token id")
        self._set_bias()
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise _wrong("structured_outputs", self.structured_outputs, "a StructuredOutputs")
        if self.structured_outputs and self.ignore_eos:
            raise _wrong("ignore_eos", True, "false with structured_outputs, which end the answer")

    def _set_strings(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str) and name == "stop":
            value = (value,)
        if value is None:
            value = ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) for s in value):
            raise _wrong(name, value, "a list of strings")
        if "" in value:
            raise _wrong(name, list(value), "non-empty strings")
        object.__setattr__(self, name, tuple(value))

    def _set_ids(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
            raise _wrong(name, value, "a list of token ids")
        for token in value:
            _integer(name, token, 0, MAX_VOCAB_SIZE - 1)
        object.__setattr__(self, name, tuple(sorted(set(value))))

    def _set_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise _wrong("logit_bias", self.logit_bias, "an object of token id: bias")
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            # JSON has string keys only, so "15": 1.0 means token 15
            token = int(key) if isinstance(key, str) and key.isdecimal() else key
            _integer("logit_bias", token, 0, MAX_VOCAB_SIZE - 1)
            _real("logit_bias", value, -100, 100)
            bias[token] = float(value)
        object.__setattr__(self, "logit_bias", bias)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **explicit: Any) -> "SamplingParams":
        """What the caller said, else what generation_config.json says, else the defaults.

        As in vLLM `do_sample` is not looked at: a request is greedy only by temperature 0.
        """
        unknown = sorted(set(explicit) - set(cls.__dataclass_fields__))
        if unknown:
            raise RequestError(f"{unknown[0]} is not a sampling parameter")
        values = {
            field: config[key]
            for key, field in GENERATION_CONFIG_FIELDS.items()
            if config.get(key) is not None
        }
        return cls(**(values | explicit))

    def resolve(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        encode: Callable[[str], Sequence[int]] | None = None,
    ) -> "SamplingParams":
        """These parameters for one request to one model.

        `encode` turns text into ids without special tokens; only bad_words need it. RequestError if
        an id is outside the vocabulary or a bad word cannot be told in the model's tokens.
        """
        if vocab_size > MAX_VOCAB_SIZE:
            raise RequestError(
                f"vocab_size is {vocab_size}: sampling handles up to {MAX_VOCAB_SIZE}"
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                _integer(name, token, 0, vocab_size - 1)
        seed = int.from_bytes(os.urandom(8), "little") if self.seed is None else self.seed
        # some checkpoints name end tokens beyond their vocabulary, which no step can choose
        eos = {token for token in eos_token_ids if token < vocab_size}
        return replace(
            self,
            seed=seed % (1 << 64),
            end_token_ids=tuple(sorted(eos | set(self.stop_token_ids or ()))),
            bad_words_token_ids=_bad_words(self.bad_words or (), encode),
        )


def _bad_words(
    words: Sequence[str], encode: Callable[[str], Sequence[int]] | None
) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and, with a space before it, inside one."""
    out: set[tuple[int, ...]] = set()
    for word in words:
        if encode is None:
            raise _wrong("bad_words", list(words), "empty, as this model has no tokenizer")
        # some tokenizers put the space before the first word themselves: then both are the same
        ids = {tuple(encode(word)), tuple(encode(" " + word.lstrip()))} - {()}
        if not ids:
            raise _wrong("bad_words", word, "text that the tokenizer can encode")
        out |= ids
    return tuple(sorted(out))


def _wrong(name: str, value: object, allowed: str) -> RequestError:
    shown = repr(value)
    return RequestError(f"{name} is {shown[:80]}: it must be {allowed}")


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, value, "an integer")
    if value < low or (high is not None and value > high):
        raise _wrong(name, value, f"at least {low}" if high is None else f"from {low} to {high}")


def _real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _wrong(name, value, "a finite number")
    if not low <= value <= high:
        raise _wrong(name, value, f"from {low:g} to {high:g}")
