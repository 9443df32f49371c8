"""Attention of one new token: every block takes one key/value head and one split of the context.

The block rotates its query heads, walks its part of the cache with an online softmax (arXiv 2205.14135) and
publishes output, maximum and sum; the splits of a head then join them, each for some of the query heads, in
the order of the splits. The last split also takes the new key and value, which travel in words like the
queries, and appends them to the cache.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.sync import dot, load_shared, stamp, store_shared
from kog_triton.backends.triton.words import (
    POLLED,
    complain,
    complain_also,
    in_range,
    pack_f32,
    publish_pairs,
    unpack_f32,
    unpack_pair,
)

BLOCK_N: tl.constexpr = tl.constexpr(64)  # positions of one step
# Positions that make another split worth its while: 16 decodes 2 % faster than 64 at depth 160-290 (H200).
SPLIT_LEAST: tl.constexpr = tl.constexpr(16)


@triton.jit
def elements(ptr, index, mask, phase, S: tl.constexpr):
    """16-bit elements out of pair words, by element index: values, and whether a word was stale."""
    w = load_shared(ptr + (index >> 1), mask, phase, S)
    first, second = unpack_pair(w, S)
    return tl.where(mask, tl.where((index & 1) == 1, second, first), 0.0), (w ^ phase) & 1


@triton.jit
def load_heads(words, q_row, kv_row, i, other, q_mask, kv_mask, phase, S: tl.constexpr):
    """Queries, the new key (both with their partners in the rotation) and the new value; 1 if any word is stale."""
    D: tl.constexpr = S.head_dim
    q, bad_q = elements(words, q_row + i, q_mask, phase, S)
    q_other, bad_o = elements(words, q_row + other, q_mask, phase, S)
    k, bad_k = elements(words, kv_row + i, kv_mask, phase, S)
    k_other, bad_p = elements(words, kv_row + other, kv_mask, phase, S)
    v, bad_v = elements(words, kv_row + S.kv_heads * D + i, kv_mask, phase, S)
    return q, q_other, k, k_other, v, tl.max((bad_q | bad_o) | (bad_k | bad_p | bad_v))


@triton.jit
def rotate(a, b, gain, gain_other, cos, sin, S: tl.constexpr):
    """A head's elements a, with partners b, normalized if the model asks, turned by cos and sin."""
    if S.qk_norm:
        scale = tl.rsqrt(tl.sum(a * a, axis=1, keep_dims=True) / S.head_dim + S.norm_eps)
        a *= scale * gain
        b *= scale * gain_other
    return a * cos + b * sin


@triton.jit
def ask_constants(layer, position, p, S: tl.constexpr):
    """What attention needs and no block sends, asked for early: the window, rotation and gains, [1, head_dim]."""
    D: tl.constexpr = S.head_dim
    DP: tl.constexpr = triton.next_power_of_2(D)
    col = tl.arange(0, DP)[None, :]
    other = tl.where(col < D // 2, col + D // 2, col - D // 2)
    inside = col < D
    window = tl.load(p.windows + layer)
    angle = p.rope + position * D + col % (D // 2)
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + D // 2, mask=inside, other=0.0)
    sin = tl.where(col < D // 2, -sin, sin)
    if S.qk_norm:
        gains = p.qk_gains + layer * 2 * D
        q_gain = tl.load(gains + col, mask=inside, other=0.0)
        q_gain_other = tl.load(gains + other, mask=inside, other=0.0)
        k_gain = tl.load(gains + D + col, mask=inside, other=0.0)
        k_gain_other = tl.load(gains + D + other, mask=inside, other=0.0)
        return window, cos, sin, q_gain, q_gain_other, k_gain, k_gain_other
    else:
        return window, cos, sin, cos, cos, cos, cos


@triton.jit
def attention(constants, layer, it, position, slot, lane, place, phase, alive, p, S: tl.constexpr):
    """Publish the attention outputs of this block's heads; returns alive."""
    for turn in range(S.kv_heads * S.splits // S.group + (S.kv_heads * S.splits % S.group != 0)):
        unit = turn * S.group + place
        if unit < S.kv_heads * S.splits:
            alive = one_head(
                constants,
                layer,
                it,
                position,
                slot,
                lane,
                unit // S.splits,
                unit % S.splits,
                phase,
                alive,
                p,
                S,
            )
    for turn in range(S.kv_heads * S.splits // S.group + (S.kv_heads * S.splits % S.group != 0)):
        unit = turn * S.group + place
        if unit < S.kv_heads * S.splits:
            alive = join_splits(
                constants,
                layer,
                position,
                lane,
                unit // S.splits,
                unit % S.splits,
                phase,
                alive,
                p,
                S,
            )
    return alive


@triton.jit
def num_splits(length, S: tl.constexpr):
    """Splits in use for so many keys."""
    return tl.minimum(S.splits, tl.maximum((length + SPLIT_LEAST - 1) // SPLIT_LEAST, 1))


@triton.jit
def one_head(
    constants, layer, it, position, slot, lane, head, split, phase, alive, p, S: tl.constexpr
):
    """One key/value head over one split of positions [first, position]."""
    D: tl.constexpr = S.head_dim
    GROUP: tl.constexpr = S.heads // S.kv_heads
    DP: tl.constexpr = triton.next_power_of_2(D)
    # tl.dot wants 16 rows, and a poll as many elements as threads (words.load_polled says why).
    G: tl.constexpr = max(16, triton.next_power_of_2(GROUP), POLLED // DP)
    g, i, n = tl.arange(0, G), tl.arange(0, DP), tl.arange(0, BLOCK_N)
    window, cos, sin, q_gain, q_gain_other, k_gain, k_gain_other = constants
    first = tl.where(window > 0, tl.maximum(position + 1 - window, 0), 0)
    length = position + 1 - first
    used = num_splits(length, S)
    # [start, end) of the cached positions of this split; the newest is not in the cache yet.
    start = first + split * length // used
    end = tl.minimum(first + (split + 1) * length // used, position)
    end = tl.where(split < used, end, start)
    # 64-bit: a cache may hold more than 2^31 elements.
    home = ((slot * S.num_layers + layer) * S.lanes + lane) * S.kv_heads + head
    cache = p.kv + home.to(tl.int64) * (2 * S.max_context * D)
    values_at = S.max_context * D
    spot = (start + n)[:, None] * D + i[None, :]
    valid = ((start + n) < end)[:, None] & (i < D)[None, :]
    # On its way while we wait for the queries.
    key = tl.load(cache + spot, mask=valid, other=0.0)
    value = tl.load(cache + values_at + spot, mask=valid, other=0.0)

    col = i[None, :]
    other = tl.where(col < D // 2, col + D // 2, col - D // 2)
    inside = col < D
    newest = split == used - 1  # this split takes the new key and value
    words = p.words + S.region("qkv") + lane * S.qkv_words
    q_row = (head * GROUP + g)[:, None] * D
    kv_row = (S.heads + head) * D + g[:, None] * 0
    mask = (g < GROUP)[:, None] & inside
    kv_mask = inside & newest & (g >= 0)[:, None]
    a, b, k, k_other, v, bad = load_heads(words, q_row, kv_row, col, other, mask, kv_mask, phase, S)
    tries = 0
    while (bad != 0) & (tries < p.limit * alive):
        a, b, k, k_other, v, bad = load_heads(
            words, q_row, kv_row, col, other, mask, kv_mask, phase, S
        )
        tries += 1
    if (bad != 0) & (alive != 0):
        row: tl.constexpr = D // 2  # words
        complain(words + head * GROUP * row, GROUP * row, phase, "attention qkv", layer, p)
        if newest:
            complain_also(words + (S.heads + head) * row, row, S.kv_heads * row, 2, p)
    alive = tl.where(bad != 0, 0, alive)
    stamp(p, it, 2, S)
    q = rotate(a, b, q_gain, q_gain_other, cos, sin, S)
    q = q * (D**-0.5 * 1.4426950408889634)  # scores in powers of two
    # The new key and value as everybody will read them from the cache: rounded.
    k = rotate(k, k_other, k_gain, k_gain_other, cos, sin, S)
    k16 = in_range(k, S).to(p.kv.dtype.element_ty)
    v16 = v.to(p.kv.dtype.element_ty)
    here = cache + position * D + col + g[:, None] * 0
    once = kv_mask & (g == 0)[:, None]
    store_shared(here, k16, once)
    store_shared(here + values_at, v16, once)
    own = tl.sum(q * k16.to(tl.float32), axis=1)
    top = tl.where(newest, own, -1e30)  # finite: a split without keys weighs nothing
    total = tl.where(newest, own * 0.0 + 1.0, 0.0)
    out = tl.where(newest, q * 0.0 + v16.to(tl.float32), 0.0)
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
    stamp(p, it, 3, S)
    return alive


@triton.jit
def load_splits(part, g, col, mine, phase, S: tl.constexpr):
    """Output, maximum and sum of query head g in every split; 1 if any word is stale."""
    D: tl.constexpr = S.head_dim
    GROUP: tl.constexpr = S.heads // S.kv_heads
    w = load_shared(part + g * D + col, mine & (col < D), phase, S)
    everywhere = mine & (col >= 0)  # [splits, head_dim], like the output: polls are never small
    t = load_shared(part + GROUP * D + g + col * 0, everywhere, phase, S)
    n = load_shared(part + GROUP * (D + 1) + g + col * 0, everywhere, phase, S)
    return w, t, n, tl.max(((w ^ phase) | (t ^ phase) | (n ^ phase)) & 1)


@triton.jit
def join_splits(constants, layer, position, lane, head, split, phase, alive, p, S: tl.constexpr):
    """Join the splits of this head for query heads split, split + used, ... and publish them."""
    D: tl.constexpr = S.head_dim
    GROUP: tl.constexpr = S.heads // S.kv_heads
    DP: tl.constexpr = triton.next_power_of_2(D)
    SP: tl.constexpr = max(triton.next_power_of_2(S.splits), POLLED // DP)
    i, s = tl.arange(0, DP), tl.arange(0, SP)
    window = constants[0]
    length = tl.where(window > 0, tl.minimum(window, position + 1), position + 1)
    used = num_splits(length, S)
    base = p.words + S.region("splits") + (lane * S.kv_heads + head) * S.splits * S.split_words
    if split < used:
        for g in range(split, GROUP, used):
            mine = (s < used)[:, None]
            part = base + s[:, None] * S.split_words
            col = i[None, :]
            w, t, n, bad = load_splits(part, g, col, mine, phase, S)
            tries = 0
            while (bad != 0) & (tries < p.limit * alive):
                w, t, n, bad = load_splits(part, g, col, mine, phase, S)
                tries += 1
            if (bad != 0) & (alive != 0):
                complain(base, used * S.split_words, phase, "attention splits", layer, p)
            alive = tl.where(bad != 0, 0, alive)
            top = tl.where(mine, unpack_f32(t), -float("inf"))
            share = tl.where(mine, tl.exp2(top - tl.max(top, axis=0)[None, :]), 0.0)
            total = tl.sum(share * tl.where(mine, unpack_f32(n), 0.0), axis=0)
            out = tl.sum(share * unpack_f32(w), axis=0) / total
            words = p.words + S.region("attention") + lane * S.attention_words
            publish_pairs(words + (head * GROUP + g) * (D // 2), 0, out, D, phase, S, DP)
    return alive
