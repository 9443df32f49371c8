"""Sums over all blocks, and what is found with them: who survives min_p, top_k and top_p.

Every rule is a cut on the logit, and a cut is found digit by digit: all blocks add what weighs at least a tried cut,
compare the sum with the target, and keep the digit. Tokens that the top-p check settles need none of it. Sums are of
integers, so their order does not matter, and no block sees another's logits. A block gives four int64, each in
two words that carry the round above them, in two buffers: a block that publishes round r has read all of round r - 1.
"""

import triton
import triton.language as tl

from kog_triton.backends.request_words import Flag
from kog_triton.backends.triton.kernel.noise import weight
from kog_triton.backends.triton.kernel.slots import NO_LOGITS, field
from kog_triton.backends.triton.kernel.sync import store_shared
from kog_triton.backends.triton.kernel.words import POLLED, nth, wait_tagged

TOP_P: tl.constexpr = tl.constexpr(int(Flag.TOP_P))
DIGITS: tl.constexpr = tl.constexpr(16)  # of a cut, two bits each
# At least those of one token: 1 + 3 + 16 + 1 + 16, and logprobs.py's 21.
ROUNDS: tl.constexpr = tl.constexpr(64)
CHECKS: tl.constexpr = tl.constexpr(2)
SURVIVES: tl.constexpr = tl.constexpr(0)
FALLS: tl.constexpr = tl.constexpr(1)
OPEN: tl.constexpr = tl.constexpr(2)  # unknown without the cut of top_k, which top_p shares out


@triton.jit
def four(a, b=0, c=0, d=0):
    """Four int64 scalars as a tensor."""
    i = tl.arange(0, 4)
    return tl.where(i == 0, a, tl.where(i == 1, b, tl.where(i == 2, c, d)))


@triton.jit
def pick(gathered, which: tl.constexpr):
    """One of the four values of every block: int64 [blocks, padded with zeros]."""
    return tl.sum(tl.where((tl.arange(0, 4) == which)[:, None], gathered, 0), axis=0)


@triton.jit
def all_gather(values, round, alive, p, S: tl.constexpr, REGION: tl.constexpr):
    """Every block's `values` (int64 [4]): [4, blocks padded with zeros], and alive."""
    NB: tl.constexpr = max(triton.next_power_of_2(S.num_blocks), POLLED // 8)
    tag = round.to(tl.int64)
    base = p.wide + S.region(REGION) // 2 + (round & 1) * (8 * S.num_blocks)
    i, half = tl.arange(0, 4)[:, None], tl.arange(0, 2)[None, :]
    bits = tl.where(half == 0, values[:, None], values[:, None] >> 32) & 0xFFFFFFFF
    store_shared(base + (2 * i + half) * S.num_blocks + p.block, (tag << 32) | bits, i >= 0)
    j, b = tl.arange(0, 8)[:, None], tl.arange(0, NB)[None, :]
    ptr, mask = base + j * S.num_blocks + b, (b < S.num_blocks) & (j >= 0)
    w, alive = wait_tagged(ptr, mask, round, alive, "sample all_reduce", p, S)
    w = w << (32 * (j & 1)).to(tl.int64)
    return tl.sum(tl.reshape(w, (4, 2, NB)), axis=1), alive


@triton.jit
def ordered(logit):
    """float32 as integers of the same order: int64, 0 .. 2^32 - 1; both zeros are one."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0, bits + 0x80000000, -1 - bits)


@triton.jit
def unordered(key):
    """The float32 that `ordered` makes this integer of."""
    bits = tl.where(key >= 0x80000000, key - 0x80000000, -1 - key)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def weight_from(keys, weights, cut):
    """What the keys at or above a cut weigh. One dimension: Triton 3.6 fails on [keys, cuts] in a loop."""
    return tl.sum(tl.where(keys >= cut, weights, 0), axis=0)


@triton.jit
def search(keys, weights, target, round, alive, p, S: tl.constexpr):
    """The highest cut such that the weights of all keys at or above it add up to the target; 0 if they never do."""
    cut = tl.zeros((), tl.int64)
    one = cut + 1
    for step in range(DIGITS):
        shift = 2 * (DIGITS - 1 - step)
        own = four(0, *[weight_from(keys, weights, cut + (n * one << shift)) for n in (1, 2, 3)])
        gathered, alive = all_gather(own, round + step, alive, p, S, "all_reduce")
        reached = (tl.sum(gathered, axis=1) >= target) & (tl.arange(0, 4) > 0)
        cut += tl.sum(reached.to(tl.int64), axis=0) << shift
    return cut, alive


@triton.jit
def distance_below(top, logit, request):
    """Of a logit from the largest one: float64, in what `weight` takes."""
    return (top.to(tl.float64) - logit.to(tl.float64)) * wide_field(request, "distance")


@triton.jit
def survivors(logit, left, top, flags, request, round, alive, p, S: tl.constexpr):
    """Which of the ids that are `left` survive min_p, top_k and top_p, the round after, and alive.

    `top` is the largest logit of all blocks, `round` the first that is free.
    """
    distance = distance_below(top, logit, request)
    left = left & (distance < wide_field(request, "min_p"))
    keys = ordered(logit)
    top_k = tl.load(request + field("top_k"))
    if top_k > 0:
        ones = left.to(tl.int64)
        cut, alive = search(keys, ones, top_k, round, alive, p, S)
        left = left & (keys >= cut)
        round += DIGITS
    if (flags & TOP_P) != 0:
        weights = tl.where(left, weight(distance), 0)
        gathered, alive = all_gather(four(tl.sum(weights, axis=0)), round, alive, p, S, "all_reduce")
        share = tl.load(request + field("top_p")).to(tl.int64) & 0xFFFFFFFF
        target = share_of(tl.sum(pick(gathered, 0), axis=0), share)
        cut, alive = search(keys, weights, target, round + 1, alive, p, S)
        left = left & (keys >= cut)
        round += DIGITS + 1
    return left, round, alive


@triton.jit
def share_of(total, share):
    """max(1, ceil(total * share / 2^32)), total below 2^62 and share below 2^32."""
    upper = (total >> 32) * share
    lower = ((total & 0xFFFFFFFF) * share).to(tl.uint64) + 0xFFFFFFFF
    return tl.maximum(upper + (lower >> 32).to(tl.int64), 1)


@triton.jit
def wide_field(request, name: tl.constexpr):
    """A float64 field of the request."""
    low = tl.load(request + field(name)).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(request + field(name) + 1).to(tl.int64)
    return ((high << 32) | low).to(tl.float64, bitcast=True)


# ---- the top-p check: the argmax of all ids, and whether it survives min_p, top_k and top_p ----
#
# If it does, it is the argmax of the survivors too, and two all-reduces replace a search for the cut; with top_p alone
# that has at least the probability top_p. If it does not, every survivor has a larger logit: the argmax of the ids with
# larger logits is checked next.


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
def verdict(sums, level, top, flags, request):
    """Whether the argmax survives. `sums`: weights of larger logits and of all ids, and how many those are."""
    before, total, first, count = [nth(sums, i) for i in (0, 1, 2, 3)]
    distance = distance_below(top, unordered(level), request)
    own = weight(distance)
    k = tl.load(request + field("top_k")).to(tl.int64)
    share = tl.load(request + field("top_p")).to(tl.int64) & 0xFFFFFFFF
    has_k, has_p = (k > 0) & (count > k), (flags & TOP_P) != 0
    falls = (distance < wide_field(request, "min_p")) == 0
    falls = falls | (has_k & (first >= k)) | (has_p & (before >= share_of(total, share)))
    # top_k leaves all up to the argmax at least
    is_open = has_k & has_p & (before >= share_of(before + own, share))
    return tl.where(falls, FALLS, tl.where(is_open, OPEN, SURVIVES))


@triton.jit
def check_argmax(gathered, key, logit, left, ids, top, flags, request, round, alive, p, S: tl.constexpr):
    """The last argmax checked, its verdict, the round after, and alive. `gathered`: every block's best candidate."""
    best_id, level = argmax_of(gathered, S)
    distance = distance_below(top, logit, request)
    weights = weight(distance)
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
