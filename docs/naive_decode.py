"""The decode step as one kernel, in few lines: what kog_triton/backends/triton/kernel does fast, done plainly.

One launch makes all tokens. Programs share the rows of each matrix, and after each stage all of them meet at a counter,
so that everybody may read what others wrote; x and the other vectors lie in memory, everything is float32. The
megakernel has no such counter (its words carry their own readiness), never stops reading weights and does not take rows
one by one. One lane, greedy, no biases, no norms of heads. tests/triton/test_naive_decode.py runs it.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def meet(s, M: tl.constexpr):
    """Wait until all programs have come here, and see what they wrote before."""
    tl.debug_barrier()
    all_here = (tl.atomic_add(s.counter, 1, sem="acq_rel") // M.PROGRAMS + 1) * M.PROGRAMS
    while tl.load(s.counter, cache_modifier=".cv") < all_here:
        pass
    # A fence: what is read from here on is what the others wrote.
    tl.atomic_add(s.counter, 0, sem="acq_rel")
    tl.debug_barrier()


@triton.jit
def matvec(y, w, x, gain, s, M: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, GATED=False):
    """y = w @ rms_norm(x) of w [ROWS, COLS]; without a gain, y += w @ x. GATED: x is swish(gate) * up, read as both."""
    k = tl.arange(0, M.WIDE)
    v = tl.load(x + k, mask=k < COLS, other=0.0)
    if GATED:
        v *= tl.load(x + COLS + k, mask=k < COLS, other=0.0) / (1 + tl.exp(-v))
    if gain is not None:
        v *= tl.rsqrt(tl.sum(v * v) / COLS + M.EPS) * tl.load(gain + k, mask=k < COLS, other=0.0)
    for row in range(tl.program_id(0), ROWS, M.PROGRAMS):
        total = tl.sum(tl.load(w + row * COLS + k, mask=k < COLS, other=0.0) * v)
        tl.store(y + row, total + tl.load(y + row) if gain is None else total)
    meet(s, M)


@triton.jit
def append(qkv, cache, rope, pos, s, M: tl.constexpr):
    """Turn queries and keys by pos's angles; keys and values go to cache [2, KV_HEADS, CONTEXT, D]."""
    j = tl.arange(0, M.D // 2)
    cos, sin = tl.load(rope + pos * M.D + j), tl.load(rope + pos * M.D + M.D // 2 + j)
    for head in range(tl.program_id(0), M.HEADS + 2 * M.KV_HEADS, M.PROGRAMS):
        own, turns = qkv + head * M.D + j, head < M.HEADS + M.KV_HEADS
        a, b = tl.load(own), tl.load(own + M.D // 2)
        own = own if head < M.HEADS else cache + ((head - M.HEADS) * M.CONTEXT + pos) * M.D + j
        tl.store(own, tl.where(turns, a * cos - b * sin, a))
        tl.store(own + M.D // 2, tl.where(turns, b * cos + a * sin, b))
    meet(s, M)


@triton.jit
def attention(out, qkv, cache, pos, s, M: tl.constexpr):
    """softmax(q k / sqrt(D)) v over positions up to `pos`; a program takes query heads."""
    t, d = tl.arange(0, M.CONTEXT)[:, None], tl.arange(0, M.D)[None, :]
    for head in range(tl.program_id(0), M.HEADS, M.PROGRAMS):
        at = cache + (head // (M.HEADS // M.KV_HEADS) * M.CONTEXT + t) * M.D + d
        q, keys = tl.load(qkv + head * M.D + d), tl.load(at, mask=t <= pos, other=0.0)
        score = tl.where(t <= pos, tl.sum(q * keys, 1, keep_dims=True) * M.D**-0.5, -1e30)
        weight = tl.exp(score - tl.max(score))
        values = tl.load(at + M.KV_HEADS * M.CONTEXT * M.D, mask=t <= pos, other=0.0)
        tl.store(out + head * M.D + d, tl.sum(weight * values, 0, keep_dims=True) / tl.sum(weight))
    meet(s, M)


@triton.jit
def decode_kernel(tokens, prompt, limit, stop, w, s, M: tl.constexpr):
    """Fill `tokens` behind the `prompt` ids that it begins with: to `limit` ids in all, or to `stop`.

    w: the weights, a layer's matrices and gains at offsets in M. s: vectors between stages, the cache, the counter.
    """
    i, pos, token = tl.arange(0, M.WIDE), tl.program_id(0) * 0, tl.load(tokens)
    while (pos < limit - 1) & ((pos < prompt) | (token != stop)):
        tl.store(s.x + i, tl.load(w.embed + token * M.H + i, mask=i < M.H), mask=i < M.H)
        meet(s, M)
        for n in range(M.LAYERS):
            own, cache = w.layers + n * M.LAYER, s.cache + n * 2 * M.KV_HEADS * M.CONTEXT * M.D
            matvec(s.qkv, own + M.QKV, s.x, own, s, M, (M.HEADS + 2 * M.KV_HEADS) * M.D, M.H)
            append(s.qkv, cache, w.rope, pos, s, M)
            attention(s.a, s.qkv, cache, pos, s, M)
            matvec(s.x, own + M.O, s.a, None, s, M, M.H, M.HEADS * M.D)
            matvec(s.gate_up, own + M.GATE_UP, s.x, own + M.H, s, M, 2 * M.F, M.H)
            matvec(s.x, own + M.DOWN, s.gate_up, None, s, M, M.H, M.F, True)
        matvec(s.logits, w.lm_head, s.x, w.norm + 0, s, M, M.V, M.H)
        pos, best = pos + 1, tl.argmax(tl.load(s.logits + i, mask=i < M.V, other=-1e30), 0)
        token = tl.where(pos < prompt, tl.load(tokens + pos), best)
        tl.store(tokens + pos, token)
