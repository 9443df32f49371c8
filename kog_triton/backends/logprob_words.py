"""Log-probabilities as a kernel delivers them: raw logits and the logarithm of their sum.

One record of 64-bit words a token, in memory that the host sees, zero before the request begins.
A word tells by itself whether it has come, so that they may arrive in any order:

    [0]   number << 32 | bits of the token's own raw logit          number: 1 for the first token
    [1]   number << 32 | bits of the largest raw logit
    [2]   number << 32 | fixed.log2 of the sum of weights, 2^24 times
    [3]   number << 32 | the token's rank among all raw logits, 1 for the largest, ties by id
    [4 ..]  (id + 1) << 32 | bits of its raw logit, the best first, ties by id

    ln softmax(l)_i = l_i - lmax - ln 2 * (log2(sum) / 2^24 - 40),   sum = sum_j weight(e_j), T = 1

weights are integers (sampling/fixed.py): their sum has no order, and 2^-26 of error at the most.
"""

import math

import numpy as np

from kog_triton.backends.request_words import MOST_LOGPROBS
from kog_triton.sampling import fixed

TOP = 4  # where the candidates begin
RECORD_WORDS = TOP + MOST_LOGPROBS

Logprobs = tuple[float, tuple[tuple[int, float], ...], int]


def read_record(record: np.ndarray, number: int, k: int) -> Logprobs | None:
    """The token's log-probability, the k best as (id, log-probability), its rank; None if some are missing.

    record uint64 [RECORD_WORDS]; the vocabulary has at least k ids.
    """
    words = record.copy()  # the kernel may be writing
    if (words[:TOP] >> np.uint64(32) != number).any() or (words[TOP : TOP + k] == 0).any():
        return None
    low = (words & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    logits = low.view(np.float32).astype(np.float64)
    log_sum = logits[1] + math.log(2) * (int(low[2]) / 2.0**fixed.GUMBEL_BITS - fixed.WEIGHT_BITS)
    ids = (words[TOP : TOP + k] >> np.uint64(32)).astype(np.int64) - 1
    best = logits[TOP : TOP + k] - log_sum
    top = tuple((int(i), float(v)) for i, v in zip(ids, best, strict=True))
    return float(logits[0] - log_sum), top, int(low[3])
