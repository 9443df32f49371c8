"""The top-p check: the argmax of all ids, and whether it survives min_p, top_k and top_p.

If it does, it is the argmax of the survivors too, and two all-reduces replace a search for the cut (all_reduce.py);
with top_p alone that has at least the probability top_p. If it does not, every survivor has a larger logit: the
argmax of the ids with larger logits is checked next.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.all_reduce import (
    TOP_P,
    all_gather,
    four,
    ordered,
    pick,
    share_of,
    unordered,
    wide_field,
)
from kog_triton.backends.triton.kernel.noise import MAX_DISTANCE, weight
from kog_triton.backends.triton.kernel.slots import NO_LOGITS, field

CHECKS: tl.constexpr = tl.constexpr(2)
SURVIVES: tl.constexpr = tl.constexpr(0)
FALLS: tl.constexpr = tl.constexpr(1)
OPEN: tl.constexpr = tl.constexpr(2)  # unknown without the cut of top_k, which top_p shares out


@triton.jit
def best_candidate(key, logit, left, ids):
    """The best of the block's ids that are `left`, as two int64: its key; its id above its logit."""
    best = tl.max(tl.where(left, key, -float("inf")), axis=0)
    best_id = tl.min(tl.where((key == best) & left, ids, NO_LOGITS), axis=0)
    level = tl.max(tl.where(ids == best_id, ordered(logit), 0), axis=0)
    return best.to(tl.int64, bitcast=True), (best_id.to(tl.int64) << 32) | level


@triton.jit
def argmax_of(gathered, S: tl.constexpr):
    """The best of all blocks' best candidates: its id, and its logit as an ordered integer."""
    key, who = pick(gathered, 2).to(tl.float64, bitcast=True), pick(gathered, 3)
    block = tl.arange(0, gathered.shape[1])
    best = tl.max(tl.where(block < S.num_blocks, key, -float("inf")), axis=0)
    first = tl.min(tl.where((block < S.num_blocks) & (key == best), who >> 32, NO_LOGITS), axis=0)
    level = tl.max(tl.where(who >> 32 == first, who & 0xFFFFFFFF, 0), axis=0)
    return first.to(tl.int32), level


@triton.jit
def weight_below(top, logit, request):
    """The distance of a logit to the largest one, as a float64, and what it weighs."""
    distance = (top.to(tl.float64) - logit.to(tl.float64)) * wide_field(request, "distance")
    return distance, weight(tl.minimum(distance, MAX_DISTANCE * 1.0).to(tl.int64))


@triton.jit
def verdict(sums, level, top, flags, request):
    """Whether the argmax survives. `sums`: weights of larger logits and of all ids, and how many those are."""
    before, total, first, count = at(sums, 0), at(sums, 1), at(sums, 2), at(sums, 3)
    distance, own = weight_below(top, unordered(level), request)
    k = tl.load(request + field("top_k")).to(tl.int64)
    share = tl.load(request + field("top_p")).to(tl.int64) & 0xFFFFFFFF
    has_k, has_p = (k > 0) & (count > k), (flags & TOP_P) != 0
    falls = (distance < wide_field(request, "min_p")) == 0
    falls = falls | (has_k & (first >= k)) | (has_p & (before >= share_of(total, share)))
    # top_k leaves all up to the argmax at least
    is_open = has_k & has_p & (before >= share_of(before + own, share))
    return tl.where(falls, FALLS, tl.where(is_open, OPEN, SURVIVES))


@triton.jit
def at(sums, which: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, 4) == which, sums, 0), axis=0)


@triton.jit
def check_argmax(
    gathered, key, logit, left, ids, top, flags, request, round, alive, p, S: tl.constexpr
):
    """The last argmax checked, its verdict, the round after, and alive. `gathered`: every block's best candidate."""
    best_id, level = argmax_of(gathered, S)
    distance, weights = weight_below(top, logit, request)
    left = left & (distance < wide_field(request, "min_p"))
    weights = tl.where(left, weights, 0)
    keys = ordered(logit)
    checks = best_id * 0 + 1
    result = best_id * 0 + FALLS
    going = checks
    while going != 0:
        before = left & (keys > level)
        own = four(
            tl.sum(tl.where(before, weights, 0), axis=0),
            tl.sum(weights, axis=0),
            tl.sum(before.to(tl.int64), axis=0),
            tl.sum(left.to(tl.int64), axis=0),
        )
        gathered, alive = all_gather(own, round, alive, p, S, "all_reduce")
        round += 1
        result = verdict(tl.sum(gathered, axis=1), level, top, flags, request)
        going = ((result == FALLS) & (checks < CHECKS)).to(tl.int32)
        if going != 0:
            bits, who = best_candidate(key, logit, before, ids)
            gathered, alive = all_gather(four(0, 0, bits, who), round, alive, p, S, "all_reduce")
            round += 1
            best_id, level = argmax_of(gathered, S)
            checks += 1
    return best_id, result, round, alive
