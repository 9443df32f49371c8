"""What a checkpoint says about generating: default sampling, where a text begins and ends.

generation_config.json is optional and wins over config.json. Only the fields named here are read;
each is typed and range-checked, and a ModelError names the file and the field.
"""

from collections.abc import Mapping
from typing import Any

from kog_triton.errors import ModelError
from kog_triton.model.config import Config

_MAX_COUNT = 1 << 31
# What would change an answer and is not read, by the value that changes nothing.
_UNREAD: dict[str, float | None] = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "min_new_tokens": 0,
    "min_length": 0,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
}


def read_generation(values: Mapping[str, Any], vocab_size: int, file: str) -> dict[str, Any]:
    """The sampling defaults that are given, by their Hugging Face names.

    Absent and null fields are left out. Keys: do_sample, temperature, top_k, top_p, min_p,
    repetition_penalty, max_new_tokens, eos_token_id (a tuple), bos_token_id.
    """
    try:
        found = _fields(Config(values), vocab_size)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from None
    return {name: value for name, value in found.items() if value is not None}


def _fields(config: Config, vocab_size: int) -> dict[str, Any]:
    return {
        "do_sample": config.boolean("do_sample", default=None),
        "temperature": config.number("temperature", low=0, high=100, default=None),
        "top_k": config.integer("top_k", low=0, high=_MAX_COUNT, default=None),
        "top_p": config.number("top_p", low=0, high=1, default=None),
        "min_p": config.number("min_p", low=0, high=1, default=None),
        "repetition_penalty": config.number("repetition_penalty", low=1e-3, high=100, default=None),
        "max_new_tokens": config.integer("max_new_tokens", high=_MAX_COUNT, default=None),
        "eos_token_id": read_eos(config, vocab_size),
        "bos_token_id": config.integer("bos_token_id", low=0, high=vocab_size - 1, default=None),
    }


def unread(values: Mapping[str, Any]) -> tuple[str, ...]:
    """A line for each field that would change an answer elsewhere and does not here."""
    return tuple(
        f"generation_config.json: {name} {values[name]!r:.40} is ignored: it is not supported"
        for name, neutral in _UNREAD.items()
        if values.get(name) not in (None, neutral, [])
    )


def read_eos(config: Config, vocab_size: int) -> tuple[int, ...] | None:
    """`eos_token_id`, one id or a list of them, without repeats; None if it is absent."""
    if isinstance(config.get("eos_token_id"), list):
        ids = config.integers("eos_token_id", low=0, high=vocab_size - 1, default=())
        return tuple(dict.fromkeys(ids))
    one = config.integer("eos_token_id", low=0, high=vocab_size - 1, default=None)
    return None if one is None else (one,)


READ = tuple(_fields(Config({}), 1))  # names of what is read
