"""An agent's answers before the fp32 reference, by the contract's tolerance: a token may be another one than the
reference's choice where its logit lies at most `MAX_GAP` standard deviations below (kog_triton/bench/check.py).

Warm and cold answers of a GPU's backend then differ by rounding alone. Both are judged token by token, each behind the
tokens that it did follow.
"""

import statistics
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from kog_triton.backends import BackendOptions
from kog_triton.bench.check import MAX_GAP, PASS, Oracle, open_oracle
from kog_triton.bench.model import find_device
from kog_triton.checkpoint.folder import Checkpoint
from tests.server.ten_questions import PRINTABLE, Question, percent_cached

ASKED_CACHED = 95  # percent of prompt tokens
ASKED_WARM = 0.15  # of the time that a prompt takes cold, of 8,000 tokens and more


class Reader:
    """The reference's logits behind a prompt; what two prompts share at their beginning it computes once."""

    def __init__(self, reference: Oracle) -> None:
        self._reference = reference
        self._held: list[int] = []

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
        """Of each of the answer's tokens, [tokens, vocab]."""
        ids, last = list(prompt), len(prompt) - 1
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self._held, ids, strict=False))
        begin = min(sum(1 for _ in same), last)
        for i in range(begin, last, PASS):
            self._reference.forward(0, ids[i : min(i + PASS, last)], i, last_only=True)
        self._held = ids[:last]
        return self._reference.forward(0, [ids[last], *answer[:-1]], last, last_only=False)


def gaps(logits: np.ndarray, answer: Sequence[int], allowed: Sequence[int]) -> np.ndarray:
    """How far each token lies below the largest logit of those allowed, in standard deviations of all."""
    rows = logits.astype(np.float64)
    best = rows[:, list(allowed)].max(axis=1)
    chosen = rows[np.arange(len(answer)), list(answer)]
    return np.asarray((best - chosen) / rows.std(axis=1))


def judge(model: Path, questions: list[Question], device: str, context: int) -> dict[str, Any]:
    """The record's part on the agent. device: torch's, where the reference computes."""
    _, where = find_device("cpu" if device == "cpu" else "")
    options = BackendOptions(max_context=context, device=where)
    reference = open_oracle(Checkpoint.open(model), options)
    try:
        reader = Reader(reference)
        largest, own, judged, differ = 0.0, 0, 0, []
        for number, question in enumerate(questions):
            for answer in {question.warm, question.cold}:
                ids = list(answer.encode())
                found = gaps(reader.logits(list(question.prompt.encode()), ids), ids, PRINTABLE)
                largest = max(largest, float(found.max()))
                own, judged = own + int((found == 0).sum()), judged + len(ids)
            if question.warm != question.cold:
                differ.append(number)
    finally:
        reference.close()
    cached = percent_cached(questions)
    warm = statistics.median(question.warm_ms for question in questions[1:])
    cold = statistics.median(question.cold_ms for question in questions[1:])
    return {
        "prompt_tokens": [questions[0].tokens, questions[-1].tokens],
        "percent_cached": {"found": round(cached, 1), "asked": ASKED_CACHED, "held": cached >= ASKED_CACHED},
        "prompt_ms": {
            "warm": round(warm, 2),
            "cold": round(cold, 2),
            "asked": ASKED_WARM,
            "held": warm <= ASKED_WARM * cold,
        },
        "answers": {
            "questions_that_differ": differ,
            "tokens_judged": judged,
            "the_references_own": round(own / judged, 4),
            "largest_gap": round(largest, 4),
            "asked": MAX_GAP,
            "held": largest <= MAX_GAP,
        },
    }
