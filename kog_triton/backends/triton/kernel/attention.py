"""Attention of one new token: every block takes one key/value head and one split of the context.

The block rotates its query heads, walks its part of the cache with an online softmax (arXiv 2205.14135) and
publishes what it found, and the logarithm of what that weighs; the splits of a head then join them, each for
some of the values, in the order of the splits. A short context is walked by the first split alone, which publishes
the head's outputs itself. The last split in use also takes the new key and value, which travel in words like the
queries, and appends them to the cache.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.sync import dot, loop_stages, stamp, store_shared
from kog_triton.backends.triton.kernel.words import (
    POLLED,
    fine_pairs,
    in_range,
    pack_f32,
    pack_pair,
    poll,
    publish_pairs,
    record_more,
    record_timeout,
    settle,
    unpack_f32,
    unpack_pair,
    wait_all,
)

BLOCK_N: tl.constexpr = tl.constexpr(64)  # positions of one step, at most
# Of keys in registers at a step. Twice as many spill where heads are wide: Laneformer-2B 713 tokens/s for 728 (H200).
STEP_BYTES: tl.constexpr = tl.constexpr(8 * 1024)
# A split of more positions than FEW takes DEEP_BYTES of keys at a step, the next steps on their way into shared memory.
# Llama-3.2-1B after 32,768 positions (H200): 887 tokens/s; 32 KB and one stage 804; 64 positions in registers 642.
FEW: tl.constexpr = tl.constexpr(128)
DEEP_BYTES: tl.constexpr = tl.constexpr(16 * 1024)
# Positions that make another split worth its while: 16 decodes 2 % faster than 64 at depth 160-290 (H200).
SPLIT_LEAST: tl.constexpr = tl.constexpr(16)
# Steps of keys that one split walks alone: what nobody joins spares an exchange, which lasts as long as two steps
# (benchmarks/triton-log.md#walked-alone).
ALONE_STEPS: tl.constexpr = tl.constexpr(2)
# Values that a split joins, at least: a sector of the L2 (benchmarks/triton-log.md#joined-values).
LEAST_JOINED: tl.constexpr = tl.constexpr(8)


# ---- queries, the new key and the new value ----
#
# They travel as pair words, and the rotation pairs value e of a row with value e + head_dim / 2. So the lower and
# the upper halves of rows are polled as two tensors of words, [rows, head_dim / 4], whose loads coalesce, and become
# four of values: lower even, lower odd, upper even, upper odd. A row is put together without moving data.


@triton.constexpr_function
def quarter(S):
    """Words of half a row, as a power of two."""
    return triton.next_power_of_2(S.head_dim // 4)


@triton.constexpr_function
def query_rows(S):
    """Rows of a key/value head: its queries. tl.dot wants 16."""
    return max(16, triton.next_power_of_2(S.heads // S.kv_heads))


@triton.jit
def element(i, S: tl.constexpr):
    """The element of a head at place i of a row that is assembled from quarters, and whether there is one."""
    HALF: tl.constexpr = S.head_dim // 2
    PLACES: tl.constexpr = 2 * quarter(S)
    if PLACES == HALF:
        return i, i < S.head_dim
    else:
        return i // PLACES * HALF + i % PLACES, (i % PLACES < HALF) & (i < 2 * PLACES)


@triton.jit
def quarters(lower, upper, mask, phase, S: tl.constexpr):
    """float32 values of words: lower even, lower odd, upper even, upper odd; zeros where there are none."""
    FINE: tl.constexpr = fine_pairs(S, 0)
    a0, a1 = unpack_pair(settle(lower), phase, S, FINE)
    b0, b1 = unpack_pair(settle(upper), phase, S, FINE)
    return [tl.where(mask, x, 0.0) for x in (a0, a1, b0, b1)]


@triton.jit
def rotated_pair(a, b, cos, sin):
    """Values and those half a head on, rotated."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rotated(x, gains, rope, S: tl.constexpr):
    """Quarters of rows, normalized if the model asks, and rotated."""
    a0, a1, b0, b1 = x
    cos0, cos1, sin0, sin1 = rope
    if S.qk_norm:
        square = tl.sum(a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1, axis=1, keep_dims=True)
        scale = tl.rsqrt(square / S.head_dim + S.norm_eps)
        a0 *= scale * gains[0]
        a1 *= scale * gains[1]
        b0 *= scale * gains[2]
        b1 *= scale * gains[3]
    a0, b0 = rotated_pair(a0, b0, cos0, sin0)
    a1, b1 = rotated_pair(a1, b1, cos1, sin1)
    return a0, a1, b0, b1


@triton.jit
def assembled(x, S: tl.constexpr):
    """Quarters [rows, n] as rows [rows, 4 n]; `element` says what stands where."""
    ROWS: tl.constexpr = x[0].shape[0]
    PLACES: tl.constexpr = 2 * quarter(S)
    lower = tl.reshape(tl.join(x[0], x[1]), (ROWS, PLACES))
    upper = tl.reshape(tl.join(x[2], x[3]), (ROWS, PLACES))
    return tl.reshape(tl.permute(tl.join(lower, upper), (0, 2, 1)), (ROWS, 2 * PLACES))


@triton.jit
def four_quarters(ptr, S: tl.constexpr):
    """A head's float32 values in four tensors [1, n]."""
    j = tl.arange(0, quarter(S))[None, :]
    inside = j < S.head_dim // 4
    return [tl.load(ptr + i // 2 * (S.head_dim // 2) + 2 * j + i % 2, mask=inside, other=0.0) for i in (0, 1, 2, 3)]


@triton.jit
def ask_constants(layer, position, p, S: tl.constexpr):
    """What attention needs and no block sends, asked for early: window, cosines, sines, gains of queries and keys."""
    window = tl.load(p.windows + layer)
    rope = four_quarters(p.rope + position * S.head_dim, S)
    if S.qk_norm:
        gains = p.qk_gains + layer * 2 * S.head_dim
        return window, rope, four_quarters(gains, S), four_quarters(gains + S.head_dim, S)
    else:
        return window, rope, 0, 0


@triton.constexpr_function
def kv_tasks_each(S):
    """KV tasks (a key/value head and a split) of a block, at most."""
    return -(-S.kv_heads * S.splits // S.group)


@triton.jit
def attention(constants, layer, it, position, slot, phase, alive, p, S: tl.constexpr):
    """Publish the attention outputs of this block's heads; returns alive."""
    alive = walk_splits(constants, layer, it, position, slot, phase, alive, p, S)
    return join_heads(constants[0], layer, position, phase, alive, p, S)


@triton.jit
def walk_splits(constants, layer, it, position, slot, phase, alive, p, S: tl.constexpr):
    """Publish what this block's splits of the context give its heads; returns alive."""
    for i in range(kv_tasks_each(S)):
        kv_task = i * S.group + p.group_index
        split = kv_task % S.splits
        there = kv_task < S.kv_heads * S.splits
        if phase is None:  # else every split publishes, in use or not, so that all phases keep step
            there = there & (split < num_splits(num_keys(constants[0], position), S))
        if there:
            task = (kv_task // S.splits, split)
            alive = one_head(constants, layer, it, position, slot, task, phase, alive, p, S)
    return alive


@triton.jit
def join_heads(window, layer, position, phase, alive, p, S: tl.constexpr):
    """Publish the outputs of this block's query heads; returns alive."""
    for i in range(kv_tasks_each(S)):
        kv_task = i * S.group + p.group_index
        if kv_task < S.kv_heads * S.splits:
            task = (kv_task // S.splits, kv_task % S.splits)
            alive = join_splits(window, layer, position, task, phase, alive, p, S)
    return alive


@triton.jit
def num_keys(window, position):
    """Keys that the token at `position` sees, its own among them."""
    return tl.where(window > 0, tl.minimum(window, position + 1), position + 1)


@triton.constexpr_function
def step_keys(S):
    """Keys of a step of a short walk."""
    return min(BLOCK_N.value, STEP_BYTES.value // (8 * quarter(S)))


@triton.constexpr_function
def walks_alone(S):
    """Whether one split walks a short context: in lanes it lost 1 % (benchmarks/triton-log.md#walked-alone)."""
    return S.lanes == 1


@triton.jit
def num_splits(length, S: tl.constexpr):
    """Splits in use for so many keys."""
    several = tl.minimum(S.splits, tl.maximum((length + SPLIT_LEAST - 1) // SPLIT_LEAST, 1))
    if walks_alone(S):
        return tl.where(length <= ALONE_STEPS * step_keys(S), 1, several)
    else:
        return several


@triton.jit
def cache_of(head, layer, slot, p, S: tl.constexpr):
    """Where the keys of a key/value head begin, with its values behind all of them."""
    home = ((slot * S.num_layers + layer) * S.lanes + p.lane) * S.kv_heads + head
    # 64-bit: a cache may hold more than 2^31 elements.
    return p.kv + home.to(tl.int64) * (2 * S.max_context * S.head_dim)


@triton.jit
def load_cached(cache, at, end, S: tl.constexpr, N: tl.constexpr):
    """Keys and values [N, head_dim] of the positions from `at` on, zeros from `end` on."""
    i, inside = element(tl.arange(0, 4 * quarter(S)), S)
    n = at + tl.arange(0, N)
    spot = n[:, None] * S.head_dim + i[None, :]
    valid = (n < end)[:, None] & inside[None, :]
    key = tl.load(cache + spot, mask=valid, other=0.0)
    return key, tl.load(cache + S.max_context * S.head_dim + spot, mask=valid, other=0.0)


@triton.jit
def softmax_step(score, top, total):
    """One step of the online softmax over scores [rows, keys]: the rows' maxima and sums with it, the keys' weights,
    and [rows, 1] what the new maxima leave of what was summed."""
    new_top = tl.maximum(top, tl.max(score, axis=1))
    weight = tl.exp2(score - new_top[:, None])
    old = tl.exp2(top - new_top)
    return new_top, total * old + tl.sum(weight, axis=1), weight, old[:, None]


@triton.jit
def add_keys(q, top, total, out, key, value, at, end, S: tl.constexpr, N: tl.constexpr):
    """Into the online softmax: N cached positions from `at` on, those before `end`."""
    score = dot(q, tl.trans(key), S)  # [rows, N]
    score = tl.where((at + tl.arange(0, N) < end)[None, :], score, -float("inf"))
    top, total, weight, old = softmax_step(score, top, total)
    return top, total, out * old + dot(weight.to(value.dtype), value, S)


@triton.jit
def one_head(constants, layer, it, position, slot, task, phase, alive, p, S: tl.constexpr):
    """One key/value head over one split of positions [first, position]."""
    head, split = task
    window, rope, q_gains, k_gains = constants
    D: tl.constexpr = S.head_dim
    GROUP: tl.constexpr = S.heads // S.kv_heads
    DP: tl.constexpr = 4 * quarter(S)
    G: tl.constexpr = query_rows(S)
    FLAT_N: tl.constexpr = step_keys(S)
    DEEP_N: tl.constexpr = max(BLOCK_N, min(256, DEEP_BYTES // (2 * DP)))
    DEEP: tl.constexpr = S.max_context > FEW  # without, the compiler leaves the long walk out
    g, j = tl.arange(0, G), tl.arange(0, quarter(S))[None, :]
    i, inside = element(tl.arange(0, DP), S)
    length = num_keys(window, position)
    first = position + 1 - length
    used = num_splits(length, S)
    # [start, end) of the cached positions of this split; the newest is not in the cache yet.
    start = first + split * length // used
    end = tl.minimum(first + (split + 1) * length // used, position)
    end = tl.where(split < used, end, start)
    cache = cache_of(head, layer, slot, p, S)
    values_at = S.max_context * D
    # On its way while we wait for the queries.
    key, value = load_cached(cache, start, end, S, FLAT_N)

    newest = split == used - 1  # this split takes the new key and value
    words = p.words + S.region("qkv") + p.lane * S.qkv_words
    row = tl.arange(0, G)[:, None]
    mask = (row < GROUP) & (j < D // 4)
    kv_mask = (row >= 0) & (j < D // 4) & newest
    q = words + (head * GROUP + row) * (D // 2) + j
    k = words + (S.heads + head + row * 0) * (D // 2) + j  # the same in all rows
    v = k + S.kv_heads * (D // 2)
    upper = D // 4
    ptrs = (q, q + upper, k, k + upper, v, v + upper)
    masks = (mask, mask, kv_mask, kv_mask, kv_mask, kv_mask)
    w, bad = poll(ptrs, masks, phase, alive, p, S)
    if (bad != 0) & (alive != 0):
        run: tl.constexpr = D // 2  # words
        record_timeout(words + head * GROUP * run, GROUP * run, phase, "attention qkv", layer, p)
        if newest:
            record_more(words + (S.heads + head) * run, run, S.kv_heads * run, 2, p)
    alive = tl.where(bad != 0, 0, alive)
    stamp(p, it, 2, S)
    q = assembled(rotated(quarters(w[0], w[1], mask, phase, S), q_gains, rope, S), S)
    q = q * (D**-0.5 * 1.4426950408889634)  # scores in powers of two
    # The new key and value as everybody will read them from the cache: rounded.
    k = assembled(rotated(quarters(w[2], w[3], kv_mask, phase, S), k_gains, rope, S), S)
    v = assembled(quarters(w[4], w[5], kv_mask, phase, S), S)
    k16 = in_range(k, S).to(p.kv.dtype.element_ty)
    v16 = v.to(p.kv.dtype.element_ty)
    here = cache + position * D + i[None, :] + row * 0
    once = inside[None, :] & newest & (row == 0)
    store_shared(here, k16, once)
    store_shared(here + values_at, v16, once)
    self_score = tl.sum(q * k16.to(tl.float32), axis=1)
    top = tl.where(newest, self_score, -1e30)  # finite: a split without keys weighs nothing
    total = tl.where(newest, self_score * 0.0 + 1.0, 0.0)
    out = tl.where(newest, q * 0.0 + v16.to(tl.float32), 0.0)
    q16 = q.to(p.kv.dtype.element_ty)
    deep = (end - start > FEW) & DEEP
    for at in range(start, tl.where(deep, start, end), FLAT_N):
        now_key, now_value = key, value
        key, value = load_cached(cache, at + FLAT_N, end, S, FLAT_N)
        top, total, out = add_keys(q16, top, total, out, now_key, now_value, at, end, S, FLAT_N)
    if DEEP:
        if deep:  # around a loop of no steps, what it keeps on its way would still be set up and torn down
            for at in tl.range(start, end, DEEP_N, num_stages=loop_stages(S)):
                keys, values = load_cached(cache, at, end, S, DEEP_N)
                top, total, out = add_keys(q16, top, total, out, keys, values, at, end, S, DEEP_N)
    own = (p.lane * S.kv_heads + head) * S.splits + split
    base = p.words + S.region("splits") + own * S.split_words
    total = tl.where(total == 0.0, 1.0, total)
    out = out / total[:, None]
    if walks_alone(S):
        if (used == 1) & newest:  # nothing to join
            even, odd = tl.split(tl.reshape(out, (G, DP // 2, 2)))
            pair, there = element(2 * tl.arange(0, DP // 2), S)
            to = p.words + S.region("attention") + p.lane * S.attention_words
            to = to + head * (GROUP * D // 2) + row * (D // 2) + (pair // 2)[None, :]
            FINE: tl.constexpr = fine_pairs(S, 1)
            store_shared(to, pack_pair(even, odd, phase, S, FINE), (row < GROUP) & there[None, :])
    out = pack_f32(out, phase)
    store_shared(base + row * D + i[None, :], out, (row < GROUP) & inside[None, :])
    store_shared(base + GROUP * D + g, pack_f32(top + tl.log2(total), phase), g < GROUP)
    stamp(p, it, 3, S)
    return alive


@triton.constexpr_function
def joined_values(S):
    """Of a key/value head's outputs, how many each of its splits joins, a power of two: all blocks have a part."""
    return triton.next_power_of_2(max(LEAST_JOINED.value, -(-S.attention_words * 2 // (S.kv_heads * S.splits))))


@triton.jit
def join_splits(window, layer, position, task, phase, alive, p, S: tl.constexpr):
    """Join the splits of this head for the values that are this split's, in use or not, and publish them."""
    head, split = task
    D: tl.constexpr = S.head_dim
    VALUES: tl.constexpr = S.heads // S.kv_heads * D  # one query head's after the other's
    EACH: tl.constexpr = joined_values(S)
    SP: tl.constexpr = max(triton.next_power_of_2(S.splits), POLLED // EACH)
    i, s = split * EACH + tl.arange(0, EACH), tl.arange(0, SP)
    used = num_splits(num_keys(window, position), S)
    base = p.words + S.region("splits") + (p.lane * S.kv_heads + head) * S.splits * S.split_words
    joins = split * EACH < VALUES
    if walks_alone(S):
        joins = joins & (used > 1)
    if joins:
        mine = (s < used)[:, None]
        part = base + s[:, None] * S.split_words
        have = mine & (i < VALUES)[None, :]
        outputs, weights = part + i[None, :], part + VALUES + (i // D)[None, :]
        ptrs, count = (outputs, weights), used * S.split_words
        w, alive = wait_all(ptrs, (have, have), base, count, phase, alive, "attention splits", layer, p, S)
        top = tl.where(mine, tl.where(have, unpack_f32(w[1]), 0.0), -float("inf"))
        share = tl.where(mine, tl.exp2(top - tl.max(top, axis=0)[None, :]), 0.0)
        out = tl.sum(share * tl.where(have, unpack_f32(w[0]), 0.0), axis=0)
        out = out / tl.sum(share, axis=0)
        words = p.words + S.region("attention") + p.lane * S.attention_words + head * (VALUES // 2)
        publish_pairs(words, split * EACH, out, VALUES, phase, S, 1, fine_pairs(S, 1))
    return alive
