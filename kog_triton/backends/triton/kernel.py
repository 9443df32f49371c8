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

from kog_triton.backends.triton.attention import ask_constants, attention
from kog_triton.backends.triton.matvec import fill, rowwise, skip_phantoms, wired
from kog_triton.backends.triton.sample import publish_candidate, start_candidate, winner
from kog_triton.backends.triton.sync import fence, meet, stamp, store_shared
from kog_triton.backends.triton.words import (
    high,
    index,
    load_polled,
    low,
    pack_f32,
    publish_pairs,
    publish_planes,
    report,
    settle,
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


POINTS = (
    "start", "qkv_proj", "attention words", "one_head", "join_splits", "attention gathered", "o_proj",
    "o_proj joined", "gate_up_proj", "mlp gathered", "down_proj", "down_proj joined",
)  # fmt: skip


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
    profile: Any  # int64 [layer runs, blocks, 16]: see POINTS
    limit: Any  # tries of a wait


@triton.jit
def load_gains(which, lane, p, S: tl.constexpr):
    """Gains of one norm (two a layer, then the last) as planes; asked for before a wait, used after it."""
    Q: tl.constexpr = S.stages[0]
    CHUNKS: tl.constexpr = Q.chunks
    WORDS: tl.constexpr = Q.tile_words
    HALF: tl.constexpr = S.hidden_size // 2
    if S.lane_norms:
        ptr = p.gains + (which * S.lanes + lane) * S.hidden_size
    else:
        ptr = p.gains + which * S.hidden_size
    gains = ()
    for c in tl.static_range(CHUNKS):
        j = c * WORDS + index(WORDS)
        even = tl.load(ptr + j, mask=j < HALF, other=0.0)
        odd = tl.load(ptr + HALF + j, mask=j < HALF, other=0.0)
        gains = gains + (even, odd)
    return gains


@triton.jit
def gained(x, gains, CHUNKS: tl.constexpr):
    """x times the norm's gains, and the sum of squares of x."""
    out = ()
    square = x[0] * 0.0
    for c in tl.static_range(CHUNKS):
        square += x[2 * c] * x[2 * c] + x[2 * c + 1] * x[2 * c + 1]
        out = out + (x[2 * c] * gains[2 * c], x[2 * c + 1] * gains[2 * c + 1])
    return out, tl.sum(square)


@triton.jit
def add_planes(x, w, half, CHUNKS: tl.constexpr, WORDS: tl.constexpr):
    out = ()
    for c in tl.static_range(CHUNKS):
        valid = c * WORDS + index(WORDS) < half
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
def module_row(place, unit, S: tl.constexpr, STAGE: tl.constexpr):
    """Rows of one unit of the block."""
    T: tl.constexpr = S.stages[STAGE]
    ROWS: tl.constexpr = T.tile_rows
    return place * T.block_rows + unit * ROWS + tl.arange(0, ROWS)


@triton.jit
def past_words(which, it, row, rows, p, S: tl.constexpr):
    """Where the lanes' outputs of layer run `it` stand, [lanes, rows], which are there, and their phase."""
    HALF: tl.constexpr = S.hidden_size // 2
    LANES: tl.constexpr = triton.next_power_of_2(S.lanes)
    slot, turn = it % S.past_slots, ((it // S.past_slots) + 1) & 1
    j = tl.arange(0, LANES)[:, None]
    base = p.words + S.region("past") + (which * S.past_slots + slot) * S.lanes * S.hidden_size
    ptr = base + j * S.hidden_size + (row & 1)[None, :] * HALF + (row >> 1)[None, :]
    return ptr, (j < S.lanes) & (row < rows)[None, :], turn


@triton.jit
def ask_past(which, layer, it, place, p, S: tl.constexpr, STAGE: tl.constexpr):
    """The other lanes' late outputs for the block's rows, asked for before the multiplication they are added to."""
    T: tl.constexpr = S.stages[STAGE]
    UNITS: tl.constexpr = T.units
    words = ()
    if S.delay > 0:
        late = tl.load(p.reduces + which * S.num_layers + layer) == DELAYED
        for u in tl.static_range(UNITS):
            row = module_row(place, u, S, STAGE)
            ptr, mask, turn = past_words(which, it - S.delay, row, T.rows, p, S)
            words = words + (load_polled(ptr, mask & late, turn, S),)
    return words


@triton.jit
def add_past(y, words, which, layer, it, row, lane, alive, p, S: tl.constexpr, STAGE: tl.constexpr):
    """y plus the other lanes' outputs of `delay` layers ago; waits if they were not there when asked for."""
    T: tl.constexpr = S.stages[STAGE]
    LANES: tl.constexpr = triton.next_power_of_2(S.lanes)
    ptr, mask, turn = past_words(which, it - S.delay, row, T.rows, p, S)
    bad = tl.max((words ^ turn) & 1)
    tries = 0
    while (bad != 0) & (tries < p.limit * alive):
        words = load_polled(ptr, mask, turn, S)
        bad = tl.max((words ^ turn) & 1)
        tries += 1
    others = mask & (tl.arange(0, LANES) != lane)[:, None]
    y += tl.sum(tl.where(others, unpack_f32(settle(words)), 0.0), axis=0)
    return y, report(bad, alive, 6 * S.num_layers + layer, p)


@triton.jit
def publish_module(
    ys,
    past,
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
    for u in tl.static_range(UNITS):
        row = module_row(place, u, S, STAGE)
        y = ys[u]
        if S.o_bias if STAGE == 1 else S.mlp_bias:
            bias = p.biases + bias_at(S, layer, STAGE) + lane * T.rows
            y += tl.load(bias + row, mask=row < T.rows, other=0.0)
        if S.mixed_reduce:
            how = tl.load(p.reduces + which * S.num_layers + layer)
            raw = y
            if S.delay > 0:
                if how == DELAYED:
                    y, alive = add_past(y, past[u], which, layer, it, row, lane, alive, p, S, STAGE)
            if how == OWN:
                y *= tl.sqrt(S.lanes * 1.0)
            publish_planes(
                p.words + S.region(name) + lane * S.hidden_size, HALF, row, y, T.rows, phase
            )
            if S.delay > 0:  # for other lanes; mostly nobody waits for it, so it comes second
                slot, turn = it % S.past_slots, ((it // S.past_slots) + 1) & 1
                sent = (
                    p.words
                    + S.region("past")
                    + (which * S.past_slots + slot) * S.lanes * S.hidden_size
                )
                publish_planes(sent + lane * S.hidden_size, HALF, row, raw, T.rows, turn)
        else:
            publish_planes(p.words + S.region(name), HALF, row, y, T.rows, phase)
    return alive


@triton.jit
def join(
    x,
    name: tl.constexpr,
    which,
    layer,
    it,
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
        if S.delay > 0:
            # Lanes drift apart: one that needs nobody's output would rewrite its own before all have it.
            slot, turn = it % S.past_slots, ((it // S.past_slots) + 1) & 1
            sent = S.region("past") + (which * S.past_slots + slot) * S.lanes * S.hidden_size
            base = p.words + tl.where(how == NOW, sent, S.region(name))
            phase = tl.where(how == NOW, turn, phase)
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
    layer, it, pos, block, lane, place, base, next_base, x, gains, ring, alive, p, S: tl.constexpr
):
    """One layer: x and the gains of its norm in, those of the next out; the ring ends full of what comes next."""
    Q: tl.constexpr = S.stages[0]
    phase = (it + 1) & 1

    stamp(p, it, 0, S)
    constants = ask_constants(layer, pos, p, S)
    xs, square = gained(x, gains, Q.chunks)
    scale = tl.rsqrt(square / S.hidden_size + S.norm_eps)
    words = p.words + S.region("qkv") + lane * S.qkv_words
    bias = p.biases + bias_at(S, layer, 0) + lane * Q.rows
    out = (words, bias, place * Q.block_rows, scale, phase)
    out, ring = rowwise(base, next_base, block, ring, xs, out, S, 0, store_qkv)

    stamp(p, it, 1, S)

    alive = attention(constants, layer, it, pos, lane, place, phase, alive, p, S)
    stamp(p, it, 4, S)

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
    stamp(p, it, 5, S)
    past = ask_past(0, layer, it, place, p, S, 1)
    ys, ring = wired(base, next_base, block, ring, xs, S, 1)
    stamp(p, it, 6, S)
    alive = publish_module(
        ys, past, "attention_out", 0, layer, it, lane, place, phase, alive, p, S, 1
    )
    gains = load_gains(2 * layer + 1, lane, p, S)
    x, alive = join(
        x, "attention_out", 0, layer, it, lane, phase, alive, p, S, Q.chunks, Q.tile_words
    )

    stamp(p, it, 7, S)

    U: tl.constexpr = S.stages[2]
    xs, square = gained(x, gains, Q.chunks)
    scale = tl.rsqrt(square / S.hidden_size + S.norm_eps)
    words = p.words + S.region("mlp") + lane * (S.ffn // 2)
    bias = p.biases + bias_at(S, layer, 2) + lane * U.rows
    out = (words, bias, place * U.block_rows, scale, phase)
    out, ring = rowwise(base, next_base, block, ring, xs, out, S, 2, silu_mul)

    stamp(p, it, 8, S)

    V: tl.constexpr = S.stages[3]
    xs, alive = wait_pairs(
        words, S.ffn // 2, phase, alive, 8 * S.num_layers + layer, p, S, V.tile_words, V.chunks
    )
    stamp(p, it, 9, S)
    past = ask_past(1, layer, it, place, p, S, 3)
    ys, ring = wired(base, next_base, block, ring, xs, S, 3)
    stamp(p, it, 10, S)
    ring = skip_phantoms(base, next_base, block, ring, S)
    if layer == S.num_layers - 1:
        # This token's rows of the cache; pairs with the fence at the start of the next token.
        fence(p.fences + block * 32, S)
    alive = publish_module(ys, past, "mlp_out", 1, layer, it, lane, place, phase, alive, p, S, 3)
    gains = load_gains(2 * layer + 2, lane, p, S)
    x, alive = join(x, "mlp_out", 1, layer, it, lane, phase, alive, p, S, Q.chunks, Q.tile_words)
    stamp(p, it, 11, S)
    return x, gains, ring, alive


@triton.jit
def load_embedding(token, p, S: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr):
    HALF: tl.constexpr = S.hidden_size // 2
    x = ()
    for c in tl.static_range(CHUNKS):
        j = c * WORDS + index(WORDS)
        w = tl.load(p.embed + token.to(tl.int64) * HALF + j, mask=j < HALF, other=0)
        x = x + (low(w, S), high(w, S))
    return x


@triton.jit
def mix_lanes(
    x,
    gains,
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
    normed, square = gained(x, gains, CHUNKS)
    scale = tl.rsqrt(square / S.hidden_size + S.norm_eps)
    part = p.words + S.region("part")
    for c in tl.static_range(CHUNKS):
        j = c * WORDS + index(WORDS)
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
        zero = zero + (x[c] * 0.0,)
    y = add_planes(zero, w, HALF, CHUNKS, WORDS)
    if S.head_mode == MEAN:
        return y, 1.0, alive
    else:
        y, square = gained(y, gains, CHUNKS)
        return y, tl.rsqrt(square / S.hidden_size + S.norm_eps), alive


@triton.jit
def run_head(
    x, gains, pos, heads_done, block, lane, place, base, next_base, ring, alive, p, S: tl.constexpr
):
    """Logits, this block's candidate, and the token that all blocks agree on."""
    Q: tl.constexpr = S.stages[0]
    T: tl.constexpr = S.stages[4]
    phase = (heads_done + 1) & 1
    first = block * T.block_rows
    vocab_first = 0
    if S.lanes > 1 and S.head_mode != VOCAB_PARALLEL:
        xs, scale, alive = mix_lanes(
            x, gains, lane, place, block, phase, alive, p, S, Q.chunks, Q.tile_words
        )
    else:
        xs, square = gained(x, gains, Q.chunks)
        scale = tl.rsqrt(square / S.hidden_size + S.norm_eps)
        if S.lanes > 1:
            first = place * T.block_rows
            vocab_first = lane * T.rows
    row = tl.where(tl.load(p.request + 9) != 0, heads_done, 0).to(tl.int64)
    logits = p.logits + row * S.vocab_size
    out = (logits, first, scale, vocab_first)
    out, ring = rowwise(base, next_base, block, ring, xs, out, S, 4, store_logits)
    meet(S)  # the block's own logits are read again by other threads
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
        # Pairs with the fence before the last publication of a token: its cache rows are there.
        fence(p.fences + block * 32, S)
        needs_head = (pos + 1 >= prompt) | all_heads
        gains = load_gains(0, lane, p, S)
        x = load_embedding(token, p, S, Q.chunks, Q.tile_words)
        base = base0
        for layer in range(S.num_layers):
            last = layer == S.num_layers - 1
            after = tl.where(needs_head, head.to(tl.int64), base0.to(tl.int64)).to(base0.dtype)
            next_base = tl.where(last, after.to(tl.int64), (base + S.layer_words).to(tl.int64)).to(
                base0.dtype
            )
            x, gains, ring, alive = run_layer(
                layer, it, pos, block, lane, place, base, next_base, x, gains, ring, alive, p, S
            )
            base = base + S.layer_words
            it += 1
        pos += 1
        if needs_head:
            token, control, ring, alive = run_head(
                x, gains, pos - 1, heads_done, block, lane, place, head, base0, ring, alive, p, S
            )
            heads_done += 1
            made += 1
            stops = tl.load(p.request + 16 + tl.arange(0, 16))
            hit = tl.max(((stops == token) & (tl.arange(0, 16) < num_stops)).to(tl.int32))
            outcome = tl.where(hit != 0, 1, tl.where(made >= most, 2, control))
            outcome = tl.where((alive == 0) | (token < 0), 4, outcome)  # a token of -1: no numbers
            if pos < prompt:
                token = tl.load(p.tokens + pos)
            if block == 0:
                word = (made.to(tl.int64) << 32) | (token.to(tl.int64) & 0xFFFFFFFF)
                tl.store(p.mailbox + 8 + made - 1, word, cache_modifier=".wt")
        else:
            token = tl.load(p.tokens + pos)
            outcome = tl.where(alive == 0, 4, 0)
    if block == 0:
        tl.store(p.mailbox + 1, outcome.to(tl.int64), cache_modifier=".wt")
