"""Is it the right model at all? Asked of every subject before it is timed, against the fp32 reference.

Two questions, on the prompt that is timed (its first CHECK_POSITIONS ids):
    logits  top-1 agreement and KL(reference || subject) at every position, by a forward pass
    text    each greedy token that the timed path makes: how far its logit lies below the largest one
            of the reference, which reads the same tokens; in standard deviations of the logits
Rounding moves a choice only between near-equal logits, a wrong kernel anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kog_triton.backends import Backend
from kog_triton.bench.subjects import Subject
from kog_triton.errors import RunError

CHECK_POSITIONS = 128
CHECK_TOKENS = 32
# Nats, mean. Random weights whose logits deviate by 6 are hard on bf16: on an H200 transformers differs by
# up to 0.100 behind 32 tokens (benchmarks/results, qwen3-0.6b), ours by up to 0.042 (triton, the same
# shape, a development run).
MAX_KL = {"backend": 0.08, "peer": 0.25}
MAX_GAP = 0.2  # standard deviations


@dataclass(frozen=True)
class Check:
    """How a subject compares with the reference; `passed` is both limits kept."""

    positions: int
    top1: float  # share of positions with the same largest logit
    kl_mean: float  # nats
    kl_max: float
    tokens: int  # greedy tokens judged
    tokens_top1: float  # share of them that are the reference's own choice
    largest_gap: float  # of a token's logit below the largest, in standard deviations
    passed: bool


class Judge:
    """The reference, open for as long as there is something to check."""

    def __init__(self, reference: Backend, prompt: Sequence[int], count: int) -> None:
        self._reference = reference
        self._prompt = list(prompt[:CHECK_POSITIONS])
        self._count = min(count, CHECK_TOKENS)
        self._logits = reference.forward_logits(self._prompt)

    def examine(self, subject: Subject, kind: str = "backend") -> Check:
        """`kind`: a key of MAX_KL. RunError if the subject computes NaN or infinity."""
        logits = subject.logits(self._prompt)
        if not np.isfinite(logits).all():
            raise RunError("its logits hold NaN or infinity")
        same, kl = compare(self._logits, logits)
        tokens = subject.generate(self._prompt, self._count).tokens
        seen = self._reference.forward_logits(self._prompt + tokens[:-1])
        gaps = token_gaps(seen[len(self._prompt) - 1 :], tokens)
        return Check(
            positions=len(self._prompt),
            top1=float(same.mean()),
            kl_mean=float(kl.mean()),
            kl_max=float(kl.max()),
            tokens=len(tokens),
            tokens_top1=float((gaps == 0).mean()),
            largest_gap=float(gaps.max()),
            passed=bool(kl.mean() <= MAX_KL[kind] and gaps.max() <= MAX_GAP),
        )

    def close(self) -> None:
        self._reference.close()


def compare(want: np.ndarray, got: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Same largest logit, and KL(want || got) in nats; both by position, of logits [T, vocab]."""
    same, kl = [], []
    for p, q in zip(want.astype(np.float64), got.astype(np.float64), strict=True):
        log_p, log_q = p - _log_sum_exp(p), q - _log_sum_exp(q)
        same.append(p.argmax() == q.argmax())
        kl.append(np.sum(np.exp(log_p) * (log_p - log_q)))
    return np.array(same), np.array(kl)


def token_gaps(logits: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """max - chosen by token, in standard deviations of that row; row i of logits chose token i."""
    rows = logits.astype(np.float64)
    chosen = rows[np.arange(len(tokens)), list(tokens)]
    return np.asarray((rows.max(axis=1) - chosen) / rows.std(axis=1))


def _log_sum_exp(x: np.ndarray) -> np.ndarray:
    top = x.max()
    return np.asarray(top + np.log(np.exp(x - top).sum()))
