"""Figures beside an answer: usage as OpenAI counts it, timings as llama.cpp names them, log-probabilities."""

import math
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kog_triton.outputs import Logprob, RequestOutput
from kog_triton.text import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; OpenAI's figure for a token that cannot be


def usage(
    outputs: Iterable[tuple[int, RequestOutput]], samples_a_job: int, reasoning_tokens: int = 0, made: bool = True
) -> dict[str, Any]:
    """Of all samples by their index: a prompt counts once, however many samples it has. `made`: their tokens were asked
    for; a prompt that is scored alone takes one that nobody is told."""
    prompt = cached = completion = 0
    for index, output in outputs:
        completion += output.metrics.output_tokens if made else 0
        if index % samples_a_job == 0:
            prompt += output.metrics.prompt_tokens
            cached += output.metrics.cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def timings(output: RequestOutput, made: bool = True) -> dict[str, Any]:
    """llama.cpp's fields, and five more; ms, tokens/s, us; MBU from 0 to 1. A figure that has no meaning is null.
    `made`: as of `usage`."""
    m = output.metrics
    rate = m.decode_tokens_per_s
    return {
        "queue_ms": _rounded(m.queue_s, 1e3),
        "cache_n": m.cached_tokens,
        "prompt_n": m.prompt_tokens - m.cached_tokens,
        "prompt_ms": _rounded(m.prefill_s, 1e3),
        "prompt_per_second": _rounded(m.prompt_tokens_per_s),
        "predicted_n": m.output_tokens if made else 0,
        "predicted_ms": _rounded((m.output_tokens - 1) / rate if rate else None, 1e3),
        "predicted_per_token_ms": _rounded(1 / rate if rate else None, 1e3),
        "predicted_per_second": _rounded(rate),
        "kv_depth": m.kv_depth_end,
        "itl_p50_us": _rounded(m.itl_p50_us),
        "itl_p99_us": _rounded(m.itl_p99_us),
        "mbu": _rounded(m.mbu),
    }


def progress(tokens: int, elapsed_s: float, prompt_tokens: int) -> dict[str, Any]:
    """Of an event: tokens until now, ms since the request came, positions that the slot holds."""
    return {
        "completion_tokens": tokens,
        "elapsed_ms": round(elapsed_s * 1e3, 3),
        "kv_depth": prompt_tokens + max(tokens - 1, 0),
    }


def _rounded(value: float | None, scale: float = 1.0) -> float | None:
    return None if value is None else round(value * scale, 3)


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Mapping[int, Logprob]], most: int) -> dict[str, Any]:
    """Of each token, and of the `most` likeliest in its place."""

    def entry(token: int, found: Logprob) -> dict[str, Any]:
        piece = tokenizer.token_bytes(token)
        return {
            "token": found.decoded_token,
            "logprob": finite(found.logprob),
            "bytes": None if piece is None else list(piece),
        }

    content = []
    for candidates in tokens:
        chosen, found = next(iter(candidates.items()))
        best = sorted((c for c in candidates.items() if c[1].rank and c[1].rank <= most), key=lambda c: c[1].rank or 0)
        content.append(entry(chosen, found) | {"top_logprobs": [entry(*candidate) for candidate in best]})
    return {"content": content, "refusal": None}


class Offsets:
    """Where each token's text begins, in characters of a text that grows: a token may hold a part of a character, and
    a special one that the text leaves out holds none."""

    def __init__(self, tokenizer: Tokenizer, skips_special: bool, begin: int = 0) -> None:
        self._tokenizer, self.end = tokenizer, begin
        self._skipped = tokenizer.special_ids if skips_special else frozenset()
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def next(self, token: int) -> int:
        begin = self.end
        if token not in self._skipped:
            self.end += len(self._decoder.decode(self._tokenizer.token_bytes(token) or b""))
        return begin


def token_name(tokenizer: Tokenizer, token: int, text: str) -> str:
    """A token's text; of one that is part of a character its bytes, as OpenAI writes them."""
    piece = tokenizer.token_bytes(token) if "\ufffd" in text else None
    if piece is None or piece.decode(errors="replace") == piece.decode(errors="ignore"):
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def completion_logprobs(
    tokens: Sequence[Mapping[int, Logprob] | None],
    names: Sequence[str],
    offsets: Sequence[int],
    name: Callable[[int, str], str],
) -> dict[str, Any]:
    """`tokens`: the candidates in each token's place, the token first; None for a prompt's first one. `names` and
    `offsets` are the tokens'; `name` names a candidate by its id and text."""
    found: dict[str, list[Any]] = {
        "tokens": list(names),
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": list(offsets),
    }
    for candidates in tokens:
        if candidates is None:
            found["token_logprobs"].append(None)
            found["top_logprobs"].append(None)
            continue
        found["token_logprobs"].append(finite(next(iter(candidates.values())).logprob))
        best: dict[str, float] = {}
        for token, c in candidates.items():
            if c.rank is not None:  # the token's own stands first, and keeps its name
                best.setdefault(name(token, c.decoded_token or ""), finite(c.logprob))
        found["top_logprobs"].append(best)
    return found


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
