"""A request as 32-bit words: what a kernel needs to know of it, in one layout for every backend.

The host computes every constant that takes float64, with the definition's own expressions
(sampling/definition.py), so that a kernel only multiplies, compares and shifts.

    words    fields (FIELDS, two words for an int64 or float64, low first) | heads of lists | lists
    a head   two words: where the list begins, counted from the first word, and its length
    mask     64-bit words beside the request, each with its epoch (`mask_words`)

`OFFSETS` names the place of every field and head; a backend hands it to its kernel, as constants of
a generated header or as constexpr. Nothing here imports torch or knows a device.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from enum import IntFlag

import numpy as np

from kog_triton.backends.mailbox import Request
from kog_triton.errors import RequestError, RunError
from kog_triton.sampling import fixed
from kog_triton.sampling.definition import LOG2E_SCALE, inverse_temperature
from kog_triton.sampling.params import SamplingParams

MOST_LOGPROBS = 20  # candidates of a token that a kernel brings
LIST_WORDS = 8192  # room for stop ids, end ids and bad words together


class Flag(IntFlag):
    """What a request asks for, in `flags`: what it does not ask for costs nothing.

    GREEDY      the largest edited logit; else the draw
    ALL_LOGITS  keep the logits of every position (`forward_logits`)
    EDITED      some logits are edited before the choice: one of the five below, or bad words
    PENALIZED   repetition, frequency or presence
    BIASED      bias_ids, bias_values
    ALLOWED     only ids whose bit in `allowed` is set
    MASKED      only ids whose bit in the host's mask of this token is set
    MIN_TOKENS  end_ids are banned until min_tokens are out
    CUT         min_p, top_k or top_p applies
    TOP_P       top_p applies
    LOGPROBS    deliver log-probabilities with every token
    """

    GREEDY = 1
    ALL_LOGITS = 2
    EDITED = 4
    PENALIZED = 8
    BIASED = 16
    ALLOWED = 32
    MASKED = 64
    MIN_TOKENS = 128
    CUT = 256
    TOP_P = 512
    LOGPROBS = 1024


WANTS_MORE = Flag.EDITED | Flag.CUT | Flag.LOGPROBS  # of its logits than a token: include/kog/choose.h


# name -> format of struct: I uint32, f float32, Q uint64, d float64
FIELDS = {
    "first": "I",  # position of the first token to run: those before are in the cache
    "prompt": "I",  # tokens of the prompt
    "most": "I",  # tokens to make at most
    "flags": "I",  # see Flag
    "seed": "Q",
    "sample": "I",  # word 2 of the random counter
    "scale": "f",  # S = 1 / temperature; 0 if greedy
    "distance": "d",  # e_i = floor((lmax - l_i) * distance)
    "min_p": "d",  # ids with (lmax - l_i) * distance below it survive; +inf without min_p
    "top_k": "I",  # 0: off
    "top_p": "I",  # P = floor(top_p * 2^32); holds if the flag TOP_P is set
    "repetition": "f",
    "frequency": "f",
    "presence": "f",
    "min_tokens": "I",
    "logprobs": "I",  # best candidates beside the token's own, if the flag LOGPROBS is set
}
# Bad word i is ids bad_ids[bad_ends[i - 1] .. bad_ends[i]) with bad_ends[-1] = 0: its last id is
# banned where the output ends with the others.
LISTS = ("stop_ids", "end_ids", "bias_ids", "bias_values", "bad_ends", "bad_ids", "allowed")


def _offsets() -> dict[str, int]:
    out, at = {}, 0
    for name, form in FIELDS.items():
        out[name] = at
        at += struct.calcsize(form) // 4
    for name in LISTS:
        out[name] = at
        at += 2
    return out


OFFSETS = _offsets()
HEAD_WORDS = OFFSETS[LISTS[-1]] + 2


def capacity(vocab_size: int) -> int:
    """Words that any request of this vocabulary fits in: what a slot sets aside, a multiple of 32."""
    words = HEAD_WORDS + LIST_WORDS + 2 * vocab_size + -(-vocab_size // 32)
    return -(-words // 32) * 32


def encode(request: Request, vocab_size: int) -> np.ndarray:
    """The request's words: uint32, as many as it takes, at most `capacity`.

    RequestError if it asks for more log-probabilities or longer lists than a kernel takes.
    """
    p = request.params
    if p.logprobs is not None and not 0 <= p.logprobs <= MOST_LOGPROBS:
        raise RequestError(
            f"logprobs is {p.logprobs}: a kernel brings at most {MOST_LOGPROBS}, choose --backend reference for more"
        )
    lists = _lists(request, vocab_size)
    small = sum(len(lists[name]) for name in ("stop_ids", "end_ids", "bad_ends", "bad_ids"))
    if small > LIST_WORDS:
        raise RequestError(f"stop_token_ids and bad_words take {small} words: a kernel has room for {LIST_WORDS}")
    fields = {
        "first": request.cached,
        "prompt": len(request.prompt),
        "most": request.max_tokens,
        "flags": int(flags_of(request, vocab_size)),
        "seed": request.seed,
        "sample": request.sample_idx,
        "scale": 0.0 if p.greedy else inverse_temperature(p),
        "distance": 0.0 if p.greedy else (1.0 / p.temperature) * LOG2E_SCALE,
        "min_p": _min_p_limit(p),
        "top_k": _top_k(p, vocab_size),
        "top_p": 0 if p.top_p >= 1 else int(p.top_p * 2.0**32),
        "repetition": p.repetition_penalty,
        "frequency": p.frequency_penalty,
        "presence": p.presence_penalty,
        "min_tokens": p.min_tokens,
        "logprobs": min(p.logprobs or 0, vocab_size),
    }
    return _join(fields, lists)


def encode_logits(count: int) -> np.ndarray:
    """Words of the request that runs `count` tokens and keeps the logits of every position."""
    fields = dict.fromkeys(FIELDS, 0) | {"prompt": count, "most": count, "flags": int(Flag.GREEDY | Flag.ALL_LOGITS)}
    return _join(fields, {})


def flags_of(request: Request, vocab_size: int) -> Flag:
    """What the request asks for; a parameter that changes nothing sets no flag."""
    p = request.params
    edits = {
        Flag.PENALIZED: p.has_penalties,
        Flag.BIASED: bool(p.logit_bias),
        Flag.ALLOWED: p.allowed_token_ids is not None,
        Flag.MASKED: request.mask is not None,
        Flag.MIN_TOKENS: p.min_tokens > 0 and bool(p.end_token_ids),
    }
    out = Flag(0)
    for flag, asked in edits.items():
        out |= flag if asked else Flag(0)
    if out or p.bad_words_token_ids:
        out |= Flag.EDITED
    if p.greedy:
        out |= Flag.GREEDY
    else:
        out |= Flag.TOP_P if p.top_p < 1 else Flag(0)
        out |= Flag.CUT if p.top_p < 1 or p.min_p > 0 or _top_k(p, vocab_size) else Flag(0)
    return out | (Flag.LOGPROBS if p.logprobs is not None else Flag(0))


def decode(words: np.ndarray) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Fields and lists (uint32) of encoded words: the inverse of `encode`, for tests and reports."""
    raw = words.astype("<u4").tobytes()
    fields = {name: struct.unpack_from("<" + form, raw, 4 * OFFSETS[name])[0] for name, form in FIELDS.items()}
    lists = {}
    for name in LISTS:
        at, count = (int(w) for w in words[OFFSETS[name] : OFFSETS[name] + 2])
        lists[name] = words[at : at + count]
    return fields, lists


def mask_words(mask: np.ndarray | None, vocab_size: int, epoch: int) -> np.ndarray:
    """The mask of one token as a kernel waits for it: uint64 [ceil(vocab / 32)], epoch << 32 | bits.

    `epoch` is the number of the token being chosen, 1 for the first of the output: a kernel waits
    until each word that it looks at has the epoch of its token. None allows every id. RunError if the
    mask is too short. A host brings a mask for every token of a MASKED request, until its launch has ended
    also of one that failed.
    """
    count = -(-vocab_size // 32)
    if mask is None:
        mask = np.full(count, 0xFFFFFFFF, np.uint32)
    if mask.size < count:
        raise RunError(f"the mask has {32 * mask.size} bits for a vocabulary of {vocab_size}")
    return mask[:count].astype(np.uint64) | np.uint64(epoch << 32)


def slow_mask(seconds: float) -> RunError:
    """The error of a request whose masks' function takes longer than a backend has others wait for it."""
    return RunError(f"the mask of this request took more than {seconds:g} s: find it faster, or before it is asked for")


def _lists(request: Request, vocab_size: int) -> dict[str, Sequence[int] | np.ndarray]:
    p = request.params
    bias = sorted((p.logit_bias or {}).items())
    bad = p.bad_words_token_ids
    out: dict[str, Sequence[int] | np.ndarray] = {
        "stop_ids": sorted(request.stop_token_ids),
        "end_ids": p.end_token_ids if p.min_tokens > 0 else (),
        "bias_ids": [token for token, _ in bias],
        "bias_values": np.array([value for _, value in bias], np.float32).view(np.uint32),
        "bad_ends": np.cumsum([len(ids) for ids in bad], dtype=np.uint32),
        "bad_ids": [token for ids in bad for token in ids],
        "allowed": (),
    }
    if p.allowed_token_ids is not None:
        bits = np.zeros(-(-vocab_size // 32) * 32, bool)
        bits[list(p.allowed_token_ids)] = True
        out["allowed"] = np.packbits(bits, bitorder="little").view("<u4")
    return out


def _join(fields: Mapping[str, float], lists: Mapping[str, Sequence[int] | np.ndarray]) -> np.ndarray:
    head = b"".join(struct.pack("<" + form, fields[name]) for name, form in FIELDS.items())
    heads, body, at = [], [], HEAD_WORDS
    for name in LISTS:
        values = np.asarray(lists.get(name, ()), np.uint32)
        heads += [at, values.size]
        body.append(values)
        at += values.size
    return np.concatenate([np.frombuffer(head, "<u4"), np.array(heads, np.uint32), *body])


def _min_p_limit(p: SamplingParams) -> float:
    """floor of a distance <= limit is the distance < limit + 1."""
    if p.greedy or p.min_p == 0:
        return math.inf
    return math.floor(-math.log2(p.min_p) * 2.0**fixed.DISTANCE_BITS) + 1.0


def _top_k(p: SamplingParams, vocab_size: int) -> int:
    return p.top_k if not p.greedy and 0 < p.top_k < vocab_size else 0
