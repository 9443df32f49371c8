"""Attention of one new token: every block takes one key/value head and one split of the context.

The block rotates its query heads, walks its part of the cache with an online softmax (arXiv 2205.14135) and
publishes output, maximum and sum; the splits of a head then join them, each for some of the query heads, in
the order of the splits. The last split also takes the new key and value, which travel in words like the
queries, and appends them to the cache.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.sync import dot, load_shared, store_shared
from kog_triton.backends.triton.words import (
    low,
    pack_f32,
    publish_pairs,
    report,
    unpack_f32,
    wait,
)

BLOCK_N: tl.constexpr = tl.constexpr(64)  # positions of one step
SPLIT_LEAST: tl.constexpr = tl.constexpr(64)  # positions that make another split worth its while


@triton.jit
def elements(ptr, index, mask, phase, S: tl.constexpr):
    """16-bit elements out of pair words, by element index: values, and whether a word was stale."""
    w = load_shared(ptr + (index >> 1), mask, phase, S)
    bits = tl.where((index & 1) == 1, (w >> 16) & 0xFFFF, w & 0xFFFE)
    return tl.where(mask, low(bits, S), 0.0), (w ^ phase) & 1


@triton.jit
def rotated(
    ptr, first, index, mask, phase, alive, position, layer, which, where, p, S: tl.constexpr
):
    """A head's elements `index` (from element `first`), normalized if the model asks, turned to `position`."""
    D: tl.constexpr = S.head_dim
    other = tl.where(index < D // 2, index + D // 2, index - D // 2)
    a, bad_a = elements(ptr, first + index, mask, phase, S)
    b, bad_b = elements(ptr, first + other, mask, phase, S)
    bad = tl.max(bad_a | bad_b)
    tries = 0
    while (bad != 0) & (tries < p.limit * alive):
        a, bad_a = elements(ptr, first + index, mask, phase, S)
        b, bad_b = elements(ptr, first + other, mask, phase, S)
        bad = tl.max(bad_a | bad_b)
        tries += 1
    alive = report(bad, alive, where, p)
    if S.qk_norm:
        scale = tl.rsqrt(tl.sum(a * a, axis=1, keep_dims=True) / D + S.norm_eps)
        gain = p.qk_gains + (layer * 2 + which) * D
        a *= scale * tl.load(gain + index, mask=index < D, other=0.0)
        b *= scale * tl.load(gain + other, mask=index < D, other=0.0)
    pair = index % (D // 2)
    cos = tl.load(p.rope + position * D + pair, mask=index < D, other=0.0)
    sin = tl.load(p.rope + position * D + D // 2 + pair, mask=index < D, other=0.0)
    return a * cos + tl.where(index < D // 2, -b, b) * sin, alive


@triton.jit
def attention(layer, position, lane, place, phase, alive, p, S: tl.constexpr):
    """Publish the attention outputs of this block's heads; returns alive."""
    for turn in range(S.kv_heads * S.splits // S.group + (S.kv_heads * S.splits % S.group != 0)):
        unit = turn * S.group + place
        if unit < S.kv_heads * S.splits:
            alive = one_head(
                layer, position, lane, unit // S.splits, unit % S.splits, phase, alive, p, S
            )
    for turn in range(S.kv_heads * S.splits // S.group + (S.kv_heads * S.splits % S.group != 0)):
        unit = turn * S.group + place
        if unit < S.kv_heads * S.splits:
            alive = join_splits(
                layer, position, lane, unit // S.splits, unit % S.splits, phase, alive, p, S
            )
    return alive


@triton.jit
def num_splits(length, S: tl.constexpr):
    """Splits in use for so many keys."""
    return tl.minimum(S.splits, tl.maximum((length + SPLIT_LEAST - 1) // SPLIT_LEAST, 1))


@triton.jit
def one_head(layer, position, lane, head, split, phase, alive, p, S: tl.constexpr):
    """One key/value head over one split of positions [first, position]."""
    D: tl.constexpr = S.head_dim
    GROUP: tl.constexpr = S.heads // S.kv_heads
    G: tl.constexpr = max(16, triton.next_power_of_2(GROUP))  # tl.dot wants 16 rows
    DP: tl.constexpr = triton.next_power_of_2(D)
    g, i, n = tl.arange(0, G), tl.arange(0, DP), tl.arange(0, BLOCK_N)
    window = tl.load(p.windows + layer)
    first = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    length = position + 1 - first
    used = num_splits(length, S)
    # [start, end) of the cached positions of this split; the newest is not in the cache yet.
    start = first + split * length // used
    end = tl.minimum(first + (split + 1) * length // used, position)
    end = tl.where(split < used, end, start)
    # 64-bit: a cache may hold more than 2^31 elements.
    home = (layer * S.lanes + lane) * S.kv_heads + head
    cache = p.kv + home.to(tl.int64) * (2 * S.max_context * D)
    values_at = S.max_context * D
    spot = (start + n)[:, None] * D + i[None, :]
    valid = ((start + n) < end)[:, None] & (i < D)[None, :]
    key = tl.load(cache + spot, mask=valid, other=0.0)  # on its way while we wait for the queries
    value = tl.load(cache + values_at + spot, mask=valid, other=0.0)

    words = p.words + S.region("qkv") + lane * S.qkv_words
    row = (head * GROUP + g)[:, None] * D
    mask = (g < GROUP)[:, None] & (i < D)[None, :]
    where = 2 * S.num_layers + layer
    q, alive = rotated(words, row, i[None, :], mask, phase, alive, position, layer, 0, where, p, S)
    q = q * (D**-0.5 * 1.4426950408889634)  # scores in powers of two
    top = tl.full((G,), -float("inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    out = tl.zeros((G, DP), tl.float32)
    if split == used - 1:
        one = tl.arange(0, 1)[:, None] * 0
        kmask = (one == 0) & (i < D)[None, :]
        k, alive = rotated(
            words,
            (S.heads + head) * D + one,
            i[None, :],
            kmask,
            phase,
            alive,
            position,
            layer,
            1,
            where,
            p,
            S,
        )
        v, stale = elements(words, (S.heads + S.kv_heads + head) * D + i, i < D, phase, S)
        bad = tl.max(stale)
        tries = 0
        while (bad != 0) & (tries < p.limit * alive):
            v, stale = elements(words, (S.heads + S.kv_heads + head) * D + i, i < D, phase, S)
            bad = tl.max(stale)
            tries += 1
        alive = report(bad, alive, where, p)
        # As everybody will read them from the cache: rounded.
        k16 = tl.reshape(k, (DP,)).to(p.kv.dtype.element_ty)
        v16 = v.to(p.kv.dtype.element_ty)
        here = cache + position * D + i
        store_shared(here, k16, i < D)
        store_shared(here + values_at, v16, i < D)
        top = tl.sum(q * k16.to(tl.float32)[None, :], axis=1)
        total = tl.full((G,), 1.0, tl.float32)
        out = tl.zeros((G, DP), tl.float32) + v16.to(tl.float32)[None, :]
    q16 = q.to(p.kv.dtype.element_ty)
    for at in range(start, end, BLOCK_N):
        score = dot(q16, tl.trans(key), S)  # [G, BLOCK_N]
        score = tl.where(((n + at) < end)[None, :], score, -float("inf"))
        now = value
        spot = (n + at + BLOCK_N)[:, None] * D + i[None, :]
        valid = ((n + at + BLOCK_N) < end)[:, None] & (i < D)[None, :]
        key = tl.load(cache + spot, mask=valid, other=0.0)
        value = tl.load(cache + values_at + spot, mask=valid, other=0.0)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - new_top[:, None])
        old = tl.exp2(top - new_top)
        total = total * old + tl.sum(weight, axis=1)
        out = out * old[:, None] + dot(weight.to(now.dtype), now, S)
        top = new_top
    # Every split publishes every time, in use or not, so that all phases keep step.
    base = (
        p.words
        + S.region("splits")
        + ((lane * S.kv_heads + head) * S.splits + split) * S.split_words
    )
    store_shared(base + g[:, None] * D + i[None, :], pack_f32(out, phase), mask)
    store_shared(base + GROUP * D + g, pack_f32(top, phase), g < GROUP)
    store_shared(base + GROUP * (D + 1) + g, pack_f32(total, phase), g < GROUP)
    return alive


@triton.jit
def join_splits(layer, position, lane, head, split, phase, alive, p, S: tl.constexpr):
    """Join the splits of this head for query heads split, split + used, ... and publish them."""
    D: tl.constexpr = S.head_dim
    GROUP: tl.constexpr = S.heads // S.kv_heads
    DP: tl.constexpr = triton.next_power_of_2(D)
    SP: tl.constexpr = triton.next_power_of_2(S.splits)
    i, s = tl.arange(0, DP), tl.arange(0, SP)
    window = tl.load(p.windows + layer)
    length = tl.where(window > 0, tl.minimum(window, position + 1), position + 1)
    used = num_splits(length, S)
    where = 3 * S.num_layers + layer
    base = p.words + S.region("splits") + (lane * S.kv_heads + head) * S.splits * S.split_words
    if split < used:
        for g in range(split, GROUP, used):
            mine = s < used
            part = base + s * S.split_words
            w, alive = wait(
                part[:, None] + g * D + i[None, :],
                mine[:, None] & (i < D)[None, :],
                phase,
                alive,
                where,
                p,
                S,
            )
            t, alive = wait(part + GROUP * D + g, mine, phase, alive, where, p, S)
            n, alive = wait(part + GROUP * (D + 1) + g, mine, phase, alive, where, p, S)
            top = tl.where(mine, unpack_f32(t), -float("inf"))
            share = tl.where(mine, tl.exp2(top - tl.max(top, axis=0)), 0.0)
            total = tl.sum(share * tl.where(mine, unpack_f32(n), 0.0), axis=0)
            out = tl.sum(share[:, None] * unpack_f32(w), axis=0) / total
            words = p.words + S.region("attention") + lane * S.attention_words
            publish_pairs(words + (head * GROUP + g) * (D // 2), 0, out, D, phase, S, DP)
    return alive
