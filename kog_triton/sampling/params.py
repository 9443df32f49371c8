"""What a caller may ask of sampling: vLLM's names and meanings, validated when built.

A value out of range is a one-line RequestError that names field, value and range. Three things are
not the caller's to know, so `resolve` adds them once per request: a seed if none was given, the ids
that end the sequence, and the bad words as token ids. `sample` wants resolved parameters.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from kog_triton.errors import RequestError, wrong
from kog_triton.sampling.structured import StructuredOutputsParams
from kog_triton.vllm_names import takes_vllm_names

MIN_TEMPERATURE = 1e-5  # below it 1 / temperature only loses range: use 0, which is greedy
MAX_TEMPERATURE = 1e5
MAX_SAMPLES = 1 << 14  # of one prompt; vLLM's limit too
MAX_INTEGER = (1 << 63) - 1  # of a count without a limit of its own
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


@takes_vllm_names
@dataclass(kw_only=True)
class SamplingParams:
    """One request's sampling. `temperature` 0 is greedy and ignores top_k, top_p and min_p.

    A field may be assigned and is then checked again; a request that has begun keeps what it was given.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None  # None or -1: `resolve` draws one; kept as None
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
    logprobs: int | None = None  # None: none; k: the token's and the k best; -1: the whole vocabulary
    prompt_logprobs: int | None = None  # as logprobs, for every token of the prompt
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    end_token_ids: tuple[int, ...] = ()  # from `resolve`: masked until min_tokens are out
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # from `resolve`

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.keys() < self.__dataclass_fields__.keys():  # __init__ is at work
            object.__setattr__(self, name, value)
        else:
            vars(self).update(vars(replace(self, **{name: value})))

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            vars(self)[name] = plain_number(getattr(self, name))
        _integer("n", self.n, 1, MAX_SAMPLES)
        _real("temperature", self.temperature, 0, MAX_TEMPERATURE)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise wrong("temperature", self.temperature, f"0 (greedy) or >= {MIN_TEMPERATURE:g}")
        if self.n > 1 and self.greedy:
            raise wrong("n", self.n, "1 when temperature is 0: greedy samples are all the same")
        _real("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise wrong("top_p", self.top_p, "above 0 and at most 1")
        _integer("top_k", self.top_k, -1)
        _real("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
            if self.seed == -1:
                vars(self)["seed"] = None
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        # a logit divided by less leaves float32's range
        _real("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, MAX_VOCAB_SIZE)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise wrong(name, getattr(self, name), "true or false")
        self._set_strings("stop")
        self._set_strings("bad_words")
        if self.stop and not self.detokenize:
            raise wrong("detokenize", self.detokenize, "true when stop strings are given")
        self._set_ids("stop_token_ids")
        self._set_ids("allowed_token_ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise wrong("allowed_token_ids", [], "null or at least one token id")
        self._set_bias()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise wrong("structured_outputs", self.structured_outputs, "a StructuredOutputsParams")
        if self.structured_outputs and self.ignore_eos:
            raise wrong("ignore_eos", True, "false with structured_outputs, which end the answer")

    def _set_strings(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str) and name == "stop":
            value = (value,)
        if value is None:
            value = ()
        if not isinstance(value, (list, tuple)) or not all(isinstance(s, str) for s in value):
            raise wrong(name, value, "a list of strings")
        if "" in value:
            raise wrong(name, list(value), "non-empty strings")
        vars(self)[name] = tuple(value)

    def _set_ids(self, name: str) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
            raise wrong(name, value, "a list of token ids")
        value = [plain_number(token) for token in value]
        for token in value:
            _integer(name, token, 0, MAX_VOCAB_SIZE - 1)
        vars(self)[name] = tuple(sorted(set(value)))

    def _set_bias(self) -> None:
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, Mapping):
            raise wrong("logit_bias", self.logit_bias, "an object of token id: bias")
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            # JSON has string keys only, so "15": 1.0 means token 15
            is_id = isinstance(key, str) and key.isdecimal() and len(key) < 20
            token = int(key) if is_id else plain_number(key)
            value = plain_number(value)
            _integer("logit_bias token id", token, 0, MAX_VOCAB_SIZE - 1)
            _real("logit_bias", value, -100, 100)
            bias[token] = float(value)
        vars(self)["logit_bias"] = bias

    def clone(self) -> "SamplingParams":
        return replace(self)

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":
        """As the constructor; what is None is left out, and biases are moved into range, as in vLLM."""
        given = {name: value for name, value in given.items() if value is not None}
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):
            try:
                given["logit_bias"] = {t: min(100.0, max(-100.0, b)) for t, b in bias.items()}
            except TypeError as error:
                raise wrong("logit_bias", bias, "an object of token id: bias") from error
        return cls(**given)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any], **explicit: Any) -> "SamplingParams":
        """What the caller said, else what generation_config.json says, else the defaults.

        As in vLLM `do_sample` is not looked at: a request is greedy only by temperature 0.
        """
        unknown = sorted(set(explicit) - set(cls.__dataclass_fields__))
        if unknown:
            raise RequestError(f"{unknown[0]} is not a sampling parameter")
        values = {field: config[key] for key, field in GENERATION_CONFIG_FIELDS.items() if config.get(key) is not None}
        return cls(**(values | explicit))

    def resolve(
        self,
        vocab_size: int,
        eos_token_ids: Collection[int] = (),
        encode: Callable[[str], Sequence[int]] | None = None,
        seed: int | None = None,
    ) -> "SamplingParams":
        """These parameters for one request to one model, with `seed` or one drawn from the system if they have none.

        `encode` turns text into ids without special tokens; only bad_words need it. RequestError if
        an id is outside the vocabulary or a bad word cannot be told in the model's tokens.
        """
        if vocab_size > MAX_VOCAB_SIZE:
            raise RequestError(f"vocab_size is {vocab_size}: sampling handles up to {MAX_VOCAB_SIZE}")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                what = f"{name} token id" if name == "logit_bias" else name
                _integer(what, token, 0, vocab_size - 1)
        if self.seed is not None:
            seed = self.seed
        elif seed is None:
            seed = draw_seed()
        # some checkpoints name end tokens beyond their vocabulary, which no step can choose
        eos = {token for token in eos_token_ids if token < vocab_size}
        resolved = copy(self)  # what was checked is not checked again
        vars(resolved).update(
            seed=seed % (1 << 64),
            end_token_ids=tuple(sorted(eos | set(self.stop_token_ids or ()))),
            bad_words_token_ids=_bad_words(self.bad_words or (), encode, vocab_size),
        )
        return resolved


def draw_seed() -> int:
    """32 bits from the system: enough to differ, short enough to type again."""
    return int.from_bytes(os.urandom(4))


def _bad_words(
    words: Sequence[str], encode: Callable[[str], Sequence[int]] | None, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and, with a space before it, inside one.

    As in vLLM a space that the caller put before a word makes no difference; a word of white space
    is meant as it is.
    """
    out: set[tuple[int, ...]] = set()
    for word in words:
        if encode is None:
            raise wrong("bad_words", list(words), "empty, as this model has no tokenizer")
        bare = word.lstrip()
        # some tokenizers put the space before the first word themselves: then some are the same
        texts = (word, bare, " " + bare) if bare else (word,)
        ids = {tuple(encode(text)) for text in texts} - {()}
        if not ids:
            raise wrong("bad_words", word, "text that the tokenizer can encode")
        out |= {variant for variant in ids if max(variant) < vocab_size}  # others cannot come
    return tuple(sorted(out))


_NUMBERS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs", "prompt_logprobs"),
)


def plain_number(value: Any) -> Any:
    """A scalar of numpy or torch as Python's number; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def _integer(name: str, value: object, low: int, high: int = MAX_INTEGER) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, value, "an integer")
    if not low <= value <= high:
        open_ended = high == MAX_INTEGER and value < low
        allowed = f"at least {low}" if open_ended else f"from {low} to {high}"
        raise wrong(name, value, allowed)


def _real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise wrong(name, value, "a number")
    if not low <= value <= high:  # a NaN is not either
        raise wrong(name, value, f"from {low:g} to {high:g}")
