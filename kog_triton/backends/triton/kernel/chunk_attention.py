"""Attention of a chunk of a prompt: every block takes a few tokens' queries of one key/value head.

Over the cache by an online softmax (arXiv 2205.14135), then over the chunk's own keys, causal. Keys and values of
the chunk are rounded as everybody will read them from the cache, into which a block appends those of its own tokens.
A row's lower and upper half are tensors of their own, [rows, head_dim / 2]: the rotation pairs them.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.attention import cache_of, query_rows, rotated_pair, softmax_step
from kog_triton.backends.triton.kernel.columns import begins, vectors
from kog_triton.backends.triton.kernel.sync import dot, loop_stages, once
from kog_triton.backends.triton.kernel.words import in_range

KEYS: tl.constexpr = tl.constexpr(64)  # of the cache, at one step


@triton.constexpr_function
def half(S):
    """Width of half a row, padded; tl.dot wants 16."""
    return max(16, triton.next_power_of_2(S.head_dim // 2))


@triton.constexpr_function
def task_tokens(S):
    """Tokens of one task, whose queries are its rows."""
    return query_rows(S) // (S.heads // S.kv_heads)


@triton.jit
def attend(layer, pos, count, slot, p, S: tl.constexpr):
    """Attention outputs of `count` tokens from `pos` on into `half_chunk`, their keys and values into the cache."""
    TOKENS: tl.constexpr = task_tokens(S)
    tasks = (count + TOKENS - 1) // TOKENS
    for task in range(p.group_index, S.kv_heads * tasks, S.group):
        attend_task(layer, pos, count, slot, task // tasks, task % tasks, p, S)


@triton.jit
def halves(at, mask, S: tl.constexpr):
    """The values at `at`, of a lower half, and those half a head on; zeros where masked."""
    lower = tl.load(at, mask=mask, other=0.0)
    return lower, tl.load(at + S.head_dim // 2, mask=mask, other=0.0)


@triton.jit
def store_halves(at, x, mask, S: tl.constexpr):
    tl.store(at, x[0], mask=mask)
    tl.store(at + S.head_dim // 2, x[1], mask=mask)


@triton.jit
def half_rows(head, token, valid, p, S: tl.constexpr):
    """Halves of the rows of `head` for tokens [n, 1], as they left the matrix; zeros where not valid."""
    ROWS: tl.constexpr = S.stages[0].rows
    AT: tl.constexpr = begins(S, "qkv")
    j = tl.arange(0, half(S))[None, :]
    mask = valid & (j < S.head_dim // 2)
    at = p.chunk + AT + (p.lane * S.columns + token) * ROWS + head * S.head_dim + j
    return halves(at, mask, S)


@triton.jit
def rotated(lower, upper, gains, position, valid, p, S: tl.constexpr):
    """Halves of rows, normalized if the model asks, and rotated for their positions [n, 1]."""
    j = tl.arange(0, half(S))[None, :]
    inside = j < S.head_dim // 2
    if S.qk_norm:
        square = tl.sum(lower * lower + upper * upper, axis=1, keep_dims=True)
        scale = tl.rsqrt(square / S.head_dim + S.norm_eps)
        lower *= scale * tl.load(gains + j, mask=inside, other=0.0)
        upper *= scale * tl.load(gains + S.head_dim // 2 + j, mask=inside, other=0.0)
    cos, sin = halves(p.rope + position * S.head_dim + j, valid & inside, S)
    return rotated_pair(lower, upper, cos, sin)


@triton.jit
def rounded(lower, upper, p, S: tl.constexpr):
    """Halves of keys or values as the cache holds them."""
    element: tl.constexpr = p.kv.dtype.element_ty
    return once(in_range(lower, S).to(element), S), once(in_range(upper, S).to(element), S)


@triton.jit
def add_keys(q, top, total, out, keys, values, seen, S: tl.constexpr):
    """Into the online softmax: keys and values in halves, of which a row sees `seen` [rows, keys]."""
    score = dot(q[0], tl.trans(keys[0]), S)
    score = dot(q[1], tl.trans(keys[1]), S, score)
    score = tl.where(seen, score, -float("inf"))
    top, total, weight, old = softmax_step(score, top, total)
    weight = weight.to(values[0].dtype)
    lower = dot(weight, values[0], S, out[0] * old)
    return top, total, (lower, dot(weight, values[1], S, out[1] * old))


@triton.jit
def attend_task(layer, pos, count, slot, head, task, p, S: tl.constexpr):
    """The queries of one key/value head for tokens task * task_tokens .. of the chunk."""
    D: tl.constexpr = S.head_dim
    GROUP: tl.constexpr = S.heads // S.kv_heads
    ROWS: tl.constexpr = query_rows(S)
    TOKENS: tl.constexpr = task_tokens(S)
    NEW: tl.constexpr = max(16, S.columns)
    element: tl.constexpr = p.kv.dtype.element_ty
    j = tl.arange(0, half(S))[None, :]
    inside = j < D // 2
    row = tl.arange(0, ROWS)[:, None]
    token, query = task * TOKENS + row // GROUP, head * GROUP + row % GROUP
    valid = (row < TOKENS * GROUP) & (token < count)
    gains = p.qk_gains + layer * 2 * D
    window = tl.load(p.windows + layer)
    lower, upper = half_rows(query, token, valid, p, S)
    lower, upper = rotated(lower, upper, gains, pos + token, valid, p, S)
    scale = D**-0.5 * 1.4426950408889634  # scores in powers of two
    q = ((lower * scale).to(element), (upper * scale).to(element))
    # A query sees positions (oldest, its own].
    oldest = tl.where(window > 0, pos + token - window, -1)
    top = tl.zeros((ROWS,), tl.float32) - 1e30  # finite: a row may see no key of a step
    total = tl.zeros((ROWS,), tl.float32)
    out = (tl.zeros((ROWS, half(S)), tl.float32), tl.zeros((ROWS, half(S)), tl.float32))

    cache = cache_of(head, layer, slot, p, S)
    VALUES: tl.constexpr = S.max_context * D
    start = tl.where(window > 0, tl.maximum(pos + task * TOKENS + 1 - window, 0), 0)
    for at in tl.range(start, pos, KEYS, num_stages=loop_stages(S)):
        n = at + tl.arange(0, KEYS)[:, None]
        spot = cache + n * D + j
        mask = (n < pos) & inside
        seen = tl.trans(n < pos) & (tl.trans(n) > oldest)
        keys, values = halves(spot, mask, S), halves(spot + VALUES, mask, S)
        top, total, out = add_keys(q, top, total, out, keys, values, seen, S)

    n = tl.arange(0, NEW)[:, None]
    there = n < count
    lower, upper = half_rows(S.heads + head, n, there, p, S)
    lower, upper = rotated(lower, upper, gains + D, pos + n, there, p, S)
    keys = rounded(lower, upper, p, S)
    lower, upper = half_rows(S.heads + S.kv_heads + head, n, there, p, S)
    values = rounded(lower, upper, p, S)
    spot = cache + (pos + n) * D + j
    own = there & (n // TOKENS == task) & inside
    store_halves(spot, keys, own, S)
    store_halves(spot + VALUES, values, own, S)
    seen = tl.trans(there) & (tl.trans(n) <= token) & (tl.trans(n) + pos > oldest)
    top, total, out = add_keys(q, top, total, out, keys, values, seen, S)
    share = 1.0 / tl.where(total == 0.0, 1.0, total)[:, None]
    to = vectors("attention", p.lane, token, p, S) + query * D + j
    tl.store(to, in_range(out[0] * share, S).to(element), mask=valid & inside)
    tl.store(to + D // 2, in_range(out[1] * share, S).to(element), mask=valid & inside)
