"""The megakernel: one launch serves a request from its first prompt token to its stop.

Every block holds its lane's residual stream x in registers (even and odd planes, `chunks` tensors each), walks the
same stages in the same order, and meets the others only in the words it needs:

    x --rms_norm--> qkv_proj ==> attention ==> o_proj ==> x --rms_norm--> gate_up_proj ==> down_proj ==> x
                            words         words      words                            words          words

The 1 / rms of a norm is applied to the result: the multiplication starts before it is known.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kog_triton.backends.triton.attention import attention
from kog_triton.backends.triton.matvec import fill, rowwise, skip_phantoms, wired
from kog_triton.backends.triton.sample import publish_candidate, start_candidate, winner
from kog_triton.backends.triton.sync import fence, store_shared
from kog_triton.backends.triton.words import (
    high,
    low,
    pack_f32,
    publish_pairs,
    publish_planes,
    unpack_f32,
    wait,
    wait_pairs,
    wait_planes,
)
from kog_triton.model.spec import Head, Reduce

NOW: tl.constexpr = tl.constexpr(int(Reduce.NOW))
OWN: tl.constexpr = tl.constexpr(int(Reduce.OWN))
DELAYED: tl.constexpr = tl.constexpr(int(Reduce.DELAYED))
MEAN: tl.constexpr = tl.constexpr(int(Head.MEAN))
VOCAB_PARALLEL: tl.constexpr = tl.constexpr(int(Head.VOCAB_PARALLEL))


class Pointers(NamedTuple):
    """Everything the kernel touches; sizes and offsets are in `Tiles`."""

    weights: Any  # int32: layers, then the head, in tiles
    embed: Any  # int32 [vocab, hidden / 2]
    gains: Any  # float32 [2 * layers + 1, lanes or 1, 2 planes, hidden / 2]
    biases: Any  # float32: a layer's qkv, o, gate_up, down rows of every lane
    qk_gains: Any  # float32 [layers, 2, head_dim]
    rope: Any  # float32 [positions, 2, head_dim / 2]
    windows: Any  # int32 [layers]
    reduces: Any  # int32 [2, layers]
    kv: Any  # [layers, lanes, kv_heads, 2, positions, head_dim]
    words: Any  # int32 [total_words], zero at launch
    winners: Any  # int64 [4, blocks], the last region of words
    logits: Any  # float32 [vocab]
    tokens: Any  # int32 [positions]: the prompt
    request: Any  # int32 [64]: see sample.py
    mailbox: Any  # int64, mapped: [0] the host's word, [1] the outcome, [8 ..] the tokens as made
    fences: Any  # int32 [blocks, 32]
    error: Any  # int32 [1]: where the first wait expired, plus one
    limit: Any  # tries of a wait


@triton.jit
def gained(x, gains, half, S: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr):
    """x times the norm's gains, and the sum of squares of x."""
    out = ()
    square = tl.zeros((WORDS,), tl.float32)
    for c in tl.static_range(CHUNKS):
        j = c * WORDS + tl.arange(0, WORDS)
        even = tl.load(gains + j, mask=j < half, other=0.0)
        odd = tl.load(gains + half + j, mask=j < half, other=0.0)
        square += x[2 * c] * x[2 * c] + x[2 * c + 1] * x[2 * c + 1]
        out = out + (x[2 * c] * even, x[2 * c + 1] * odd)
    return out, tl.sum(square, axis=0)


@triton.jit
def add_planes(x, w, half, CHUNKS: tl.constexpr, WORDS: tl.constexpr):
    out = ()
    for c in tl.static_range(CHUNKS):
        valid = c * WORDS + tl.arange(0, WORDS) < half
        even = x[2 * c] + tl.where(valid, unpack_f32(w[2 * c]), 0.0)
        odd = x[2 * c + 1] + tl.where(valid, unpack_f32(w[2 * c + 1]), 0.0)
        out = out + (even, odd)
    return out


# ---- epilogues of the stages that read x: y [tile_rows] of one row tile ----


@triton.jit
def store_qkv(y, unit, out, S: tl.constexpr, T: tl.constexpr):
    ROWS: tl.constexpr = T.tile_rows
    base, bias, first, scale, phase = out
    row = first + unit * ROWS
    y = y * scale
    if S.qkv_bias:
        r = row + tl.arange(0, ROWS)
        y += tl.load(bias + r, mask=r < T.rows, other=0.0)
    publish_pairs(base, row, y, T.rows, phase, S, ROWS)
    return out


@triton.jit
def silu_mul(y, unit, out, S: tl.constexpr, T: tl.constexpr):
    ROWS: tl.constexpr = T.tile_rows
    PAIRS: tl.constexpr = T.tile_rows // 2
    base, bias, first, scale, phase = out
    row = first + unit * ROWS
    y = y * scale
    if S.mlp_bias:
        r = row + tl.arange(0, ROWS)
        y += tl.load(bias + r, mask=r < T.rows, other=0.0)
    gate, up = tl.split(tl.reshape(y, (PAIRS, 2)))
    h = gate / (1.0 + tl.exp(-gate)) * up
    publish_pairs(base, row // 2, h, T.rows // 2, phase, S, PAIRS)
    return out


@triton.jit
def store_logits(y, unit, out, S: tl.constexpr, T: tl.constexpr):
    ROWS: tl.constexpr = T.tile_rows
    logits, first, scale, vocab_first = out
    r = first + unit * ROWS + tl.arange(0, ROWS)
    tl.store(logits + vocab_first + r, y * scale, mask=r < T.rows)
    return out


# ---- the residual stream ----


@triton.jit
def publish_module(
    ys,
    name: tl.constexpr,
    which,
    layer,
    it,
    lane,
    place,
    phase,
    alive,
    p,
    S: tl.constexpr,
    STAGE: tl.constexpr,
):
    """Send the block's rows of a module's output as the layer's reduction asks; returns alive."""
    T: tl.constexpr = S.stages[STAGE]
    HALF: tl.constexpr = S.hidden_size // 2
    UNITS: tl.constexpr = T.units
    ROWS: tl.constexpr = T.tile_rows
    for u in tl.static_range(UNITS):
        row = place * T.block_rows + u * ROWS + tl.arange(0, ROWS)
        y = ys[u]
        if S.o_bias if STAGE == 1 else S.mlp_bias:
            bias = p.biases + bias_at(S, layer, STAGE) + lane * T.rows
            y += tl.load(bias + row, mask=row < T.rows, other=0.0)
        if S.mixed_reduce:
            how = tl.load(p.reduces + which * S.num_layers + layer)
            sent = p.words + S.region("past") + which * S.past_slots * S.lanes * S.hidden_size
            if S.delay > 0:
                slot, turn = it % S.past_slots, ((it // S.past_slots) + 1) & 1
                publish_planes(
                    sent + (slot * S.lanes + lane) * S.hidden_size, HALF, row, y, T.rows, turn
                )
                if how == DELAYED:
                    old = it - S.delay
                    slot, turn = old % S.past_slots, ((old // S.past_slots) + 1) & 1
                    for j in range(S.lanes):
                        if j != lane:
                            ptr = (
                                sent
                                + (slot * S.lanes + j) * S.hidden_size
                                + (row & 1) * HALF
                                + (row >> 1)
                            )
                            w, alive = wait(
                                ptr, row < T.rows, turn, alive, 6 * S.num_layers + layer, p, S
                            )
                            y += tl.where(row < T.rows, unpack_f32(w), 0.0)
            if how == OWN:
                y *= tl.sqrt(S.lanes * 1.0)
        publish_planes(p.words + S.region(name) + lane * S.hidden_size, HALF, row, y, T.rows, phase)
    return alive


@triton.jit
def join(
    x,
    name: tl.constexpr,
    which,
    layer,
    lane,
    phase,
    alive,
    p,
    S: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """x plus the module's output, gathered from all blocks of the lane (of all lanes if reduced NOW)."""
    HALF: tl.constexpr = S.hidden_size // 2
    where = (4 + which) * S.num_layers + layer
    base = p.words + S.region(name)
    if S.mixed_reduce:
        how = tl.load(p.reduces + which * S.num_layers + layer)
        first, last = tl.where(how == NOW, 0, lane), tl.where(how == NOW, S.lanes, lane + 1)
        for j in range(first, last):
            w, alive = wait_planes(
                base + j * S.hidden_size, HALF, phase, alive, where, p, S, WORDS, CHUNKS
            )
            x = add_planes(x, w, HALF, CHUNKS, WORDS)
    else:
        w, alive = wait_planes(base, HALF, phase, alive, where, p, S, WORDS, CHUNKS)
        x = add_planes(x, w, HALF, CHUNKS, WORDS)
    return x, alive


@triton.constexpr_function
def bias_rows(S):
    """Bias rows of a layer: those of all four stages, of every lane."""
    return sum(s.rows for s in S.stages[:4]) * S.lanes


@triton.constexpr_function
def bias_before(S, stage):
    return sum(s.rows for s in S.stages[:stage]) * S.lanes


@triton.jit
def bias_at(S: tl.constexpr, layer, STAGE: tl.constexpr):
    ROWS: tl.constexpr = bias_rows(S)
    BEFORE: tl.constexpr = bias_before(S, STAGE)
    return layer * ROWS + BEFORE


@triton.jit
def run_layer(
    layer, it, pos, block, lane, place, base, next_base, x, ring, alive, p, S: tl.constexpr
):
    """One layer: x of this block's lane in, x out; the ring ends full of what comes next."""
    Q: tl.constexpr = S.stages[0]
    HALF: tl.constexpr = S.hidden_size // 2
    phase = (it + 1) & 1
    gains = p.gains + (
        2 * layer * S.hidden_size
        if not S.lane_norms
        else (2 * layer * S.lanes + lane) * S.hidden_size
    )
    step = S.hidden_size * (S.lanes if S.lane_norms else 1)

    xs, square = gained(x, gains, HALF, S, Q.chunks, Q.tile_words)
    scale = tl.rsqrt(square / S.hidden_size + S.norm_eps)
    words = p.words + S.region("qkv") + lane * S.qkv_words
    bias = p.biases + bias_at(S, layer, 0) + lane * Q.rows
    out = (words, bias, place * Q.block_rows, scale, phase)
    out, ring = rowwise(base, next_base, block, ring, xs, out, S, 0, store_qkv)

    alive = attention(layer, pos, lane, place, phase, alive, p, S)

    A: tl.constexpr = S.stages[1]
    xs, alive = wait_pairs(
        p.words + S.region("attention") + lane * S.attention_words,
        S.attention_words,
        phase,
        alive,
        7 * S.num_layers + layer,
        p,
        S,
        A.tile_words,
        A.chunks,
    )
    ys, ring = wired(base, next_base, block, ring, xs, S, 1)
    alive = publish_module(ys, "attention_out", 0, layer, it, lane, place, phase, alive, p, S, 1)
    x, alive = join(x, "attention_out", 0, layer, lane, phase, alive, p, S, Q.chunks, Q.tile_words)

    U: tl.constexpr = S.stages[2]
    xs, square = gained(x, gains + step, HALF, S, Q.chunks, Q.tile_words)
    scale = tl.rsqrt(square / S.hidden_size + S.norm_eps)
    words = p.words + S.region("mlp") + lane * (S.ffn // 2)
    bias = p.biases + bias_at(S, layer, 2) + lane * U.rows
    out = (words, bias, place * U.block_rows, scale, phase)
    out, ring = rowwise(base, next_base, block, ring, xs, out, S, 2, silu_mul)

    V: tl.constexpr = S.stages[3]
    xs, alive = wait_pairs(
        words, S.ffn // 2, phase, alive, 8 * S.num_layers + layer, p, S, V.tile_words, V.chunks
    )
    ys, ring = wired(base, next_base, block, ring, xs, S, 3)
    ring = skip_phantoms(base, next_base, block, ring, S)
    if layer == S.num_layers - 1:
        fence(
            p.fences + block * 32, S
        )  # the cache rows of this token; pairs with the fence in run_token
    alive = publish_module(ys, "mlp_out", 1, layer, it, lane, place, phase, alive, p, S, 3)
    x, alive = join(x, "mlp_out", 1, layer, lane, phase, alive, p, S, Q.chunks, Q.tile_words)
    return x, ring, alive


@triton.jit
def load_embedding(token, p, S: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr):
    HALF: tl.constexpr = S.hidden_size // 2
    x = ()
    for c in tl.static_range(CHUNKS):
        j = c * WORDS + tl.arange(0, WORDS)
        w = tl.load(p.embed + token.to(tl.int64) * HALF + j, mask=j < HALF, other=0)
        x = x + (low(w, S), high(w, S))
    return x


@triton.jit
def mix_lanes(
    x,
    lane,
    place,
    block,
    phase,
    alive,
    p,
    S: tl.constexpr,
    CHUNKS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The head's input from all lanes, in two small hops: rows of each lane, then sums of rows."""
    HALF: tl.constexpr = S.hidden_size // 2
    # First hop: the block sends its rows of its lane's stream.
    gains = p.gains + 2 * S.num_layers * S.hidden_size * (S.lanes if S.lane_norms else 1)
    gains += lane * S.hidden_size if S.lane_norms else 0
    normed, square = gained(x, gains, HALF, S, CHUNKS, WORDS)
    scale = tl.rsqrt(square / S.hidden_size + S.norm_eps)
    part = p.words + S.region("part")
    for c in tl.static_range(CHUNKS):
        j = c * WORDS + tl.arange(0, WORDS)
        mine = (j < HALF) & (j * S.group // HALF == place)
        for plane in tl.static_range(2):
            value = normed[2 * c + plane] * scale if S.head_mode == MEAN else x[2 * c + plane]
            store_shared(
                part + lane * S.hidden_size + plane * HALF + j, pack_f32(value, phase), mine
            )
    # Second hop: every block adds its rows over the lanes.
    ROWS: tl.constexpr = triton.next_power_of_2((S.hidden_size + S.num_blocks - 1) // S.num_blocks)
    r = block * ((S.hidden_size + S.num_blocks - 1) // S.num_blocks) + tl.arange(0, ROWS)
    valid = (tl.arange(0, ROWS) < (S.hidden_size + S.num_blocks - 1) // S.num_blocks) & (
        r < S.hidden_size
    )
    total = tl.zeros((ROWS,), tl.float32)
    for j in range(S.lanes):
        w, alive = wait(part + j * S.hidden_size + r, valid, phase, alive, 9 * S.num_layers, p, S)
        total += tl.where(valid, unpack_f32(w), 0.0)
    if S.head_mode == MEAN:
        total = total / S.lanes
    store_shared(p.words + S.region("y") + r, pack_f32(total, phase), valid)
    w, alive = wait_planes(
        p.words + S.region("y"), HALF, phase, alive, 9 * S.num_layers + 1, p, S, WORDS, CHUNKS
    )
    zero = ()
    for c in tl.static_range(2 * CHUNKS):
        zero = zero + (tl.zeros((WORDS,), tl.float32),)
    y = add_planes(zero, w, HALF, CHUNKS, WORDS)
    if S.head_mode == MEAN:
        return y, 1.0, alive
    else:
        y, square = gained(y, gains, HALF, S, CHUNKS, WORDS)
        return y, tl.rsqrt(square / S.hidden_size + S.norm_eps), alive


@triton.jit
def run_head(
    x, pos, heads_done, block, lane, place, base, next_base, ring, alive, p, S: tl.constexpr
):
    """Logits, this block's candidate, and the token that all blocks agree on."""
    Q: tl.constexpr = S.stages[0]
    T: tl.constexpr = S.stages[4]
    HALF: tl.constexpr = S.hidden_size // 2
    phase = (heads_done + 1) & 1
    first = block * T.block_rows
    vocab_first = 0
    if S.lanes > 1 and S.head_mode != VOCAB_PARALLEL:
        xs, scale, alive = mix_lanes(
            x, lane, place, block, phase, alive, p, S, Q.chunks, Q.tile_words
        )
    else:
        gains = p.gains + 2 * S.num_layers * S.hidden_size * (S.lanes if S.lane_norms else 1)
        gains += lane * S.hidden_size if S.lane_norms else 0
        xs, square = gained(x, gains, HALF, S, Q.chunks, Q.tile_words)
        scale = tl.rsqrt(square / S.hidden_size + S.norm_eps)
        if S.lanes > 1:
            first = place * T.block_rows
            vocab_first = lane * T.rows
    row = tl.where(tl.load(p.request + 9) != 0, heads_done, 0).to(tl.int64)
    logits = p.logits + row * S.vocab_size
    out = (logits, first, scale, vocab_first)
    out, ring = rowwise(base, next_base, block, ring, xs, out, S, 4, store_logits)
    tl.debug_barrier()  # the block's own logits, read again below by other threads
    count = tl.maximum(tl.minimum(T.block_rows, T.rows - first), 0)
    best, best_id = start_candidate(logits, vocab_first + first, count, pos + 1, p, S)
    publish_candidate(best, best_id, heads_done + 1, block, p, S)
    token, control, alive = winner(heads_done + 1, alive, 9 * S.num_layers + 2, p, S)
    return token, control, ring, alive


@triton.jit
def decode_kernel(p, S: tl.constexpr):
    """Serve the request in `p.request` from its first token to run until a stop."""
    Q: tl.constexpr = S.stages[0]
    block = tl.program_id(0)
    lane, place = block // S.group, block % S.group
    pos = tl.load(p.request + 0)
    prompt = tl.load(p.request + 1)
    most = tl.load(p.request + 2)
    num_stops = tl.load(p.request + 3)
    all_heads = tl.load(p.request + 9) != 0
    token = tl.load(p.tokens + pos)
    zero = block * 0  # a tensor also in the interpreter
    alive, made, heads_done, it, outcome = zero + 1, zero, zero, zero, zero
    base0 = p.weights + tl.zeros((), tl.int64)
    head = base0 + S.num_layers * S.layer_words
    ring = fill(base0, block, S)
    while outcome == 0:
        fence(
            p.fences + block * 32, S
        )  # pairs with the fence before the last publication of a token
        needs_head = (pos + 1 >= prompt) | all_heads
        x = load_embedding(token, p, S, Q.chunks, Q.tile_words)
        base = base0
        for layer in range(S.num_layers):
            last = layer == S.num_layers - 1
            after = tl.where(needs_head, head.to(tl.int64), base0.to(tl.int64)).to(base0.dtype)
            next_base = tl.where(last, after.to(tl.int64), (base + S.layer_words).to(tl.int64)).to(
                base0.dtype
            )
            x, ring, alive = run_layer(
                layer, it, pos, block, lane, place, base, next_base, x, ring, alive, p, S
            )
            base = base + S.layer_words
            it += 1
        pos += 1
        if needs_head:
            token, control, ring, alive = run_head(
                x, pos - 1, heads_done, block, lane, place, head, base0, ring, alive, p, S
            )
            heads_done += 1
            made += 1
            stops = tl.load(p.request + 16 + tl.arange(0, 16))
            hit = tl.max(((stops == token) & (tl.arange(0, 16) < num_stops)).to(tl.int32))
            outcome = tl.where(hit != 0, 1, tl.where(made >= most, 2, control))
            outcome = tl.where(alive == 0, 4, outcome)
            if pos < prompt:
                token = tl.load(p.tokens + pos)
            if block == 0:
                word = (made.to(tl.int64) << 32) | token.to(tl.int64)
                tl.store(p.mailbox + 8 + made - 1, word, cache_modifier=".wt")
        else:
            token = tl.load(p.tokens + pos)
            outcome = tl.where(alive == 0, 4, 0)
    if block == 0:
        tl.store(p.mailbox + 1, outcome.to(tl.int64), cache_modifier=".wt")
