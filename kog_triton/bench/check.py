"""Is it the right model at all? Asked of every engine before it is timed, against the fp32 reference.

Two questions:
    logits  top-1 agreement and KL(reference || engine) at CHECK_POSITIONS positions, by a forward pass: as many of
            a short prompt, whose own are too few to tell (qwen3-4b: 0.036 at 32, 0.081 at 128)
    text    each greedy token that the timed path makes after its prompt's first CHECK_DEPTH positions: how
            far its logit lies below the largest one of the reference, which reads the same tokens; in
            standard deviations of the logits
Rounding moves a choice only between near-equal logits, a wrong kernel anywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from kog_triton.backends import BackendOptions, WeightSource, find_backend
from kog_triton.bench.engines import EngineUnderTest
from kog_triton.errors import RunError

CHECK_POSITIONS = 128
# The reference has no flash attention: four times as many take it sixteen times as long.
CHECK_DEPTH = 32768
CHECK_TOKENS = 32
ROOM = 4 << 30  # bytes beside the reference's weights: not measured
PASS = 256  # of them that the reference takes at once: bounds its scores at PASS x depth a head
# Standard deviations. Two kernels that share no code chose the same token 0.23 and 0.25 below the largest (H200,
# llama-3.2-1b after 256 ids): rounding. A token drawn at random lies about four below, by calculation.
MAX_GAP = 0.5


@dataclass(frozen=True)
class Check:
    """How an engine compares with the reference; `passed` is both limits kept."""

    positions: int  # whose logits are compared
    depth: int  # positions before the first token judged
    top1: float  # share of positions with the same largest logit
    kl_mean: float  # nats
    kl_max: float
    kl_limit: float  # of kl_mean
    tokens: int  # greedy tokens judged
    tokens_top1: float  # share of them that are the reference's own choice
    largest_gap: float  # of a token's logit below the largest, in standard deviations
    passed: bool


class Oracle(Protocol):
    """The reference backend as far as it judges: it also reads a prompt part by part."""

    def forward(self, slot: int, token_ids: Sequence[int], start: int, last_only: bool) -> np.ndarray:
        """Run tokens at positions start.. in a slot; logits float32 [T or 1, vocab]."""
        ...

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray: ...

    def close(self) -> None: ...


def open_oracle(weights: WeightSource, options: BackendOptions) -> Oracle:
    """The fp32 reference of a model; where the GPU has no room for its weights, one that reads them when used."""
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    fits = not on_gpu or 4 * weights.spec.num_parameters + ROOM < torch.cuda.mem_get_info()[0]
    reference: Callable[..., Any] = find_backend("reference")
    return cast(Oracle, reference(weights, options, keeps=fits))


class Judge:
    """The reference, open for as long as there is something to check.

    ids     whose logits are compared: `logits` are the reference's
    prompt  behind which `count` tokens are judged, or CHECK_TOKENS if that is fewer
    """

    def __init__(self, reference: Oracle, ids: Sequence[int], prompt: Sequence[int], count: int) -> None:
        self._reference = reference
        self._ids, self._prompt = list(ids), list(prompt[:CHECK_DEPTH])
        self._count = min(count, CHECK_TOKENS)
        self.logits = reference.forward_logits(self._ids)
        # The prompt's keys and values stay in the slot; each engine's tokens are read after them.
        for i in range(0, len(self._prompt), PASS):
            self._last = reference.forward(0, self._prompt[i : i + PASS], i, last_only=True)

    def examine(self, engine: EngineUnderTest, kl_limit: float) -> Check:
        """Its mean KL may be `kl_limit` nats. RunError if the engine computes NaN or infinity."""
        logits = engine.logits(self._ids)
        if not np.isfinite(logits).all():
            raise RunError("its logits hold NaN or infinity")
        same, kl = compare(self.logits, logits)
        tokens = engine.generate(self._prompt, self._count).tokens
        gaps = token_gaps(self._seen_by(tokens), tokens)
        return Check(
            positions=len(logits),
            depth=len(self._prompt),
            top1=float(same.mean()),
            kl_mean=float(kl.mean()),
            kl_max=float(kl.max()),
            kl_limit=kl_limit,
            tokens=len(tokens),
            tokens_top1=float((gaps == 0).mean()),
            largest_gap=float(gaps.max()),
            passed=bool(kl.mean() <= kl_limit and gaps.max() <= MAX_GAP),
        )

    def _seen_by(self, tokens: Sequence[int]) -> np.ndarray:
        """The reference's logits that each token was to be chosen from, [tokens, vocab]."""
        if len(tokens) == 1:
            return self._last
        more = self._reference.forward(0, tokens[:-1], len(self._prompt), last_only=False)
        return np.concatenate([self._last, more])

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
