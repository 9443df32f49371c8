"""The definition of sampling: one position's logits in, one token out, the same bits everywhere.

    adjust     penalties, then bias, then bans (-inf)                       float32
    greedy     temperature 0: the largest logit, ties to the lowest id
    survivors  min_p, then top_k, then top_p, each over what the one before left; all are cuts on
               the logit, and every tie of a cut survives
    draw       argmax over the survivors of  l_i * S + G_i * C,  ties to the lowest id

Every float operation is either alone (nothing for a compiler to fuse it with) or made of products
that are exact in double, so that a fused multiply-add gives the same bits; every sum is of
integers, so its order does not matter. `inv_t` = 1 / temperature in double, on the host:

    adjust, with double(x) exact and every right-hand side rounded to float32 once, for seen ids:
        l = l > 0 ? l / repetition : l * repetition    in double; ids of prompt and output
        l = l - frequency * count                      in double, where the product is exact
        l = l - presence                               where count > 0
        l = l + bias                                   in float32
        l = -inf                                       banned
      (vLLM adds the bias before the penalties; the two differ only for a biased id that is also
      repeated and has a repetition penalty.)
    distance  e_i = floor((double(lmax) - double(l_i)) * (inv_t * LOG2E_SCALE)), then at most
              MAX_DISTANCE
    min_p     e_i <= floor(-log2(min_p) * 2^26), the logarithm on the host
    top_k     l_i >= the k-th largest l
    top_p     the highest cut whose sum of weight(e_i) over l_i >= cut is at least
              ceil(total * P / 2^32), P = floor(top_p * 2^32), total = sum over what remains
    draw      S = float32(inv_t) as double, so l_i * S is exact; G_i from philox and fixed.gumbel;
              C = -ln 2 / 2^24 rounded to 20 bits, so G_i * C is exact; the sum rounds once

This order (temperature, min_p, top_k, top_p) is vLLM's. How this file gets there is its own affair:
it computes noise in floating point for all and the exact integers only for ids whose key could win.
"""

import math
from dataclasses import dataclass

import numpy as np

from kog_triton.errors import RequestError, RunError
from kog_triton.sampling import fixed
from kog_triton.sampling.history import History
from kog_triton.sampling.params import SamplingParams
from kog_triton.sampling.philox import random_words, vocab_words

LOG2E_SCALE = math.log2(math.e) * 2.0**fixed.DISTANCE_BITS

# no noise exceeds another's by more: (log2 33 + log2(2^33 / log2 e)) * ln 2 = 26.004
NOISE_SPAN = 26.01
# float64 noise is off by rounding, the integers by GUMBEL_ERROR; twice the sum, generously
NOISE_SLACK = 4 * fixed.GUMBEL_ERROR

CHUNK = 8192  # ids whose weights are made at a time: they stay in the CPU's cache


@dataclass(frozen=True)
class Sampled:
    """A token; if `logprobs` were asked for, its own, the best as (id, logprob), and its rank."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


def sample(
    logits: np.ndarray,
    params: SamplingParams,
    history: History,
    position: int,
    sample_idx: int = 0,
    mask: np.ndarray | None = None,
) -> Sampled:
    """The token at `position`, the index in its sequence of the token being chosen.

    logits float32 [vocab]; mask uint32 [ceil(vocab / 32)], bit i & 31 of word i >> 5 set = id i
    allowed. RunError if a logit is NaN or +inf; RequestError if nothing is allowed.
    """
    best = int(logits.argmax())  # numpy's argmax stops at the first NaN
    if not logits[best] < np.inf:
        what = "NaN" if np.isnan(logits[best]) else "+inf"
        raise RunError(f"the logits of position {position} hold {what} at id {best}: the run is void")
    edited = adjust(logits, params, history, mask)
    if edited is not logits:
        best = int(edited.argmax())
    if edited[best] == -np.inf:
        raise nothing_allowed(position)
    token = best if params.greedy else draw(edited, survivors(edited, params), params, position, sample_idx)
    if params.logprobs is None:
        return Sampled(token)
    return Sampled(token, *raw_logprobs(logits, token, params.logprobs), rank_of(logits, token))


def nothing_allowed(position: int) -> RequestError:
    """What a backend says when every id is banned."""
    return RequestError(
        f"no token is allowed at position {position}: relax allowed_token_ids, bad_words, min_tokens or the mask"
    )


def rank_of(logits: np.ndarray, token: int) -> int:
    """1 for the likeliest id; ties by id, as in `raw_logprobs`."""
    ahead = np.count_nonzero(logits > logits[token])
    return 1 + int(ahead + np.count_nonzero(logits[:token] == logits[token]))


def raw_logprobs(logits: np.ndarray, token: int, k: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """ln softmax of the logits as the model made them, in float64: the token's, and the k best.

    Best first, ties by id; k = -1 is the whole vocabulary.
    """
    wide = logits.astype(np.float64)
    top = wide.max()
    log_sum = top + math.log(np.exp(wide - top).sum())
    k = wide.size if k < 0 else min(k, wide.size)
    ids = np.argpartition(-wide, k - 1)[:k] if 0 < k < wide.size else np.arange(k)
    if 0 < k < wide.size:  # of the ids that tie for the last place, the lowest
        last = wide[ids].min()
        above = ids[wide[ids] > last]
        ids = np.concatenate([above, np.flatnonzero(wide == last)[: k - above.size]])
    ids = ids[np.lexsort((ids, -wide[ids]))]
    return float(wide[token] - log_sum), tuple((int(i), float(wide[i] - log_sum)) for i in ids)


def adjust(logits: np.ndarray, params: SamplingParams, history: History, mask: np.ndarray | None = None) -> np.ndarray:
    """Logits after penalties, bias and bans: a new array, or the given one if nothing applies."""
    banned = _banned_ids(params, history)
    if not (
        params.has_penalties or params.logit_bias or params.allowed_token_ids is not None or banned or mask is not None
    ):
        return logits
    edited = logits.astype(np.float32)
    if params.has_penalties:
        _penalize(edited, params, history)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), np.int64)
        edited[ids] += np.fromiter(params.logit_bias.values(), np.float32)
    if params.allowed_token_ids is not None:
        allowed = np.zeros(edited.size, bool)
        allowed[list(params.allowed_token_ids)] = True
        edited[~allowed] = -np.inf
    if banned:
        edited[banned] = -np.inf
    if mask is not None:
        bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")[: edited.size]
        if bits.size < edited.size:
            raise RunError(f"the mask has {bits.size} bits for a vocabulary of {edited.size}")
        edited[bits == 0] = -np.inf
    return edited


def _penalize(edited: np.ndarray, params: SamplingParams, history: History) -> None:
    ids, counts = history.seen, history.counts
    seen = edited[ids]
    if params.repetition_penalty != 1:
        factor = np.float64(np.float32(params.repetition_penalty))
        wide = seen.astype(np.float64)
        seen = np.where(wide > 0, wide / factor, wide * factor).astype(np.float32)
    if params.frequency_penalty != 0:
        step = np.float64(np.float32(params.frequency_penalty))
        seen = (seen.astype(np.float64) - step * counts).astype(np.float32)
    if params.presence_penalty != 0:
        seen = np.where(counts > 0, seen - np.float32(params.presence_penalty), seen)
    edited[ids] = seen


def _banned_ids(params: SamplingParams, history: History) -> list[int]:
    banned = [ids[-1] for ids in params.bad_words_token_ids if history.ends_with(ids[:-1])]
    if len(history.output) < params.min_tokens:
        banned += params.end_token_ids
    return banned


def survivors(edited: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    """Ids that min_p, top_k and top_p leave, ascending: int64; None if none of them applies."""
    k = params.top_k if 0 < params.top_k < edited.size else 0
    if not (params.min_p > 0 or k or params.top_p < 1):
        return None
    lmax = edited.max()
    scale = (1.0 / params.temperature) * LOG2E_SCALE
    # left in a list are logits only: every rule is a cut, so which id holds which does not matter
    left = edited[edited > -np.inf]
    if params.min_p > 0:
        limit = math.floor(-math.log2(params.min_p) * 2.0**fixed.DISTANCE_BITS)
        left = left[_distances(left, lmax, scale) < limit + 1]
    if k and k < left.size:
        left = left[left >= np.partition(left, left.size - k)[left.size - k]]
    cut = _nucleus_cut(left, lmax, scale, params.top_p) if params.top_p < 1 else left.min()
    return np.flatnonzero(edited >= cut)


def _nucleus_cut(left: np.ndarray, lmax: np.float32, scale: float, top_p: float) -> np.float32:
    """The highest cut whose weights reach the share top_p of all weights in `left`."""
    # weights further out are zero, and a cut among zeros never comes before the total is reached
    left = left[_distances(left, lmax, scale) < fixed.MAX_DISTANCE]

    def weights(logits: np.ndarray) -> np.ndarray:
        return fixed.weight(_distances(logits, lmax, scale).astype(np.int64))

    chunks = range(0, left.size, CHUNK)
    total = sum(int(weights(left[i : i + CHUNK]).sum()) for i in chunks)
    target = max(1, -(-total * int(top_p * 2.0**32) >> 32))
    size = 256
    while True:  # the whole of `left` reaches the target
        size = min(8 * size, left.size)
        head = np.sort(np.partition(left, left.size - size)[left.size - size :])[::-1]
        sums = np.cumsum(weights(head))
        if sums[-1] >= target:
            return head[np.searchsorted(sums, target)]


def _distances(logits: np.ndarray, lmax: np.float32, scale: float) -> np.ndarray:
    """Distances before they are rounded down: float64."""
    return (np.float64(lmax) - logits.astype(np.float64)) * scale


def draw(edited: np.ndarray, ids: np.ndarray | None, params: SamplingParams, position: int, sample_idx: int) -> int:
    """The id of the largest key among `ids` (None = all); few ids need their exact key."""
    if params.seed is None:
        raise RequestError("sampling needs a seed: call SamplingParams.resolve once per request")
    lmax = float(edited.max())
    reach = NOISE_SPAN * params.temperature
    # no key below this wins; the last term outweighs the rounding to float32
    lowest = np.float32(lmax - reach - 1e-6 * (abs(lmax) + reach))
    ids = np.flatnonzero(edited >= lowest) if ids is None else ids[edited[ids] >= lowest]
    if ids.size == 1:
        return int(ids[0])
    if 4 * ids.size > edited.size:
        words = vocab_words(edited.size, position, sample_idx, params.seed)[ids]
    else:
        words = random_words(ids, position, sample_idx, params.seed)
    scaled = edited[ids].astype(np.float64) * inverse_temperature(params)
    rough = (words + 0.5) * 2.0**-32
    np.log2(rough, out=rough)
    np.negative(rough, out=rough)
    np.log2(rough, out=rough)
    rough *= fixed.NOISE_SCALE * 2.0**fixed.GUMBEL_BITS
    rough += scaled
    top = rough.max()
    close = np.flatnonzero(rough >= top - NOISE_SLACK - abs(top) * 2.0**-48)
    if close.size == 1:
        return int(ids[close[0]])
    keys = scaled[close] + fixed.gumbel(words[close]) * fixed.NOISE_SCALE
    return int(ids[close[keys.argmax()]])


def inverse_temperature(params: SamplingParams) -> float:
    """S: 1 / temperature rounded to float32, so that S times a logit is exact in double."""
    return float(np.float32(1.0 / params.temperature))
