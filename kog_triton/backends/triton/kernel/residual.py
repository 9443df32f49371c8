"""The residual stream: every block holds its lane's x in registers, as even and odd planes of several tensors each.

A module's output leaves a block in words, row by row, and joins x in all blocks of the lane; `Reduce` says what
the lanes owe each other (model/spec.py). A lane that needs nobody's output may run ahead, so where outputs are
reduced late all of them travel in a ring, in which a buffer is rewritten only after everybody has read it.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.sync import store_shared
from kog_triton.backends.triton.kernel.words import (
    POLLED,
    fine_pairs,
    half_bits,
    in_columns,
    load_polled,
    pack_f32,
    plane_index,
    plane_tiles,
    poll_on,
    publish_pairs,
    record_more,
    record_timeout,
    settle,
    unpack_f32,
    unpack_pair,
    wait_pair_words,
    wait_planes,
)
from kog_triton.model.spec import Reduce

NOW: tl.constexpr = tl.constexpr(int(Reduce.NOW))
OWN: tl.constexpr = tl.constexpr(int(Reduce.OWN))
DELAYED: tl.constexpr = tl.constexpr(int(Reduce.DELAYED))


@triton.jit
def load_gains(which, p, S: tl.constexpr):
    """Gains of one norm (two a layer, then the last) as planes; asked for before a wait, used after it."""
    HALF: tl.constexpr = S.hidden_size // 2
    norm = which * S.lanes + p.lane if S.lane_norms else which
    ptr = p.gains + norm * S.hidden_size
    gains = ()
    for c in tl.static_range(plane_tiles(S)):
        j = plane_index(c, S)
        even = tl.load(ptr + j, mask=j < HALF, other=0.0)
        odd = tl.load(ptr + HALF + j, mask=j < HALF, other=0.0)
        gains = gains + (even, odd)
    return gains


@triton.jit
def squares(x, S: tl.constexpr, RUN: tl.constexpr):
    """Squares of the planes' tensors of one shape, added up in that shape."""
    FIRST: tl.constexpr = S.stages[0].runs[RUN][0]
    COUNT: tl.constexpr = S.stages[0].runs[RUN][1]
    square = x[2 * FIRST] * 0.0
    for c in tl.static_range(FIRST, FIRST + COUNT):
        square += x[2 * c] * x[2 * c] + x[2 * c + 1] * x[2 * c + 1]
    return square


@triton.jit
def folded(square):
    """[POLLED] sums of elements that a thread has alone, in any order; of fewer elements all of them, as they are."""
    EACH: tl.constexpr = square.numel // POLLED
    if EACH > 1:
        return tl.sum(tl.reshape(square, (EACH, POLLED), can_reorder=True), axis=0)
    else:
        return tl.reshape(square, (square.numel,), can_reorder=True)


@triton.jit
def sum_of_squares(x, S: tl.constexpr):
    """Over the planes; tensors of as many elements as threads and more share one sum over the block."""
    RUNS: tl.constexpr = len(S.stages[0].runs)
    total = squares(x, S, 0)
    if RUNS == 1:
        return tl.sum(total)
    else:
        total = folded(total)
        rest = 0.0
        for run in tl.static_range(1, RUNS):
            more = folded(squares(x, S, run))
            if more.numel == total.numel:
                total += more
            else:
                rest += tl.sum(more)
        return tl.sum(total) + rest


@triton.jit
def rms_norm(x, gains, S: tl.constexpr):
    """x over its root mean square, times the norm's gains."""
    scale = tl.rsqrt(sum_of_squares(x, S) / S.hidden_size + S.norm_eps)
    out = ()
    for i in tl.static_range(2 * plane_tiles(S)):
        out = out + (x[i] * scale * gains[i],)
    return out


@triton.jit
def rounded(x, S: tl.constexpr, STAGE: tl.constexpr):
    """Planes as STAGE reads them: words of two values in the model's 16-bit type, or fine pairs."""
    FINE: tl.constexpr = fine_pairs(S, STAGE)
    out = ()
    for c in tl.static_range(plane_tiles(S)):
        even, odd = x[2 * c], x[2 * c + 1]
        out = out + ((half_bits(odd, S, FINE) << 16) | half_bits(even, S, FINE),)
    return out


@triton.jit
def add_planes(x, ws, S: tl.constexpr):
    """x plus the planes of a vector; or plus its words of two, which are half as many."""
    out = ()
    for c in tl.static_range(plane_tiles(S)):
        valid = plane_index(c, S) < S.hidden_size // 2
        if len(ws) < len(x):
            even, odd = unpack_pair(ws[c], 0, S, True)  # either phase: its bit is masked
            even = x[2 * c] + tl.where(valid, even, 0.0)
            odd = x[2 * c + 1] + tl.where(valid, odd, 0.0)
        else:
            even = x[2 * c] + tl.where(valid, unpack_f32(ws[2 * c]), 0.0)
            odd = x[2 * c + 1] + tl.where(valid, unpack_f32(ws[2 * c + 1]), 0.0)
        out = out + (even, odd)
    return out


# ---- biases ----


@triton.constexpr_function
def bias_rows(S, stages):
    """Bias rows of a layer's first stages, of every lane."""
    return sum(s.rows for s in S.stages[:stages]) * S.lanes


@triton.jit
def bias_at(S: tl.constexpr, layer, STAGE: tl.constexpr):
    return layer * bias_rows(S, 4) + bias_rows(S, STAGE)


@triton.jit
def silu(v):
    return v / (1.0 + tl.exp(-v))


@triton.jit
def biased(y, row, valid, lane, layer, p, S: tl.constexpr, STAGE: tl.constexpr):
    """y [.., n] plus the biases of rows `row` [n], those valid, if the stage has any."""
    if (S.qkv_bias, S.o_bias, S.mlp_bias, S.mlp_bias)[STAGE]:
        bias = p.biases + bias_at(S, layer, STAGE) + lane * S.stages[STAGE].rows
        y += tl.load(bias + row, mask=valid, other=0.0)
    return y


# ---- outputs of o_proj (STAGE 1) and down_proj (STAGE 3) ----


@triton.constexpr_function
def stage_input(stage):
    return ("x", "attention", "x", "mlp")[stage]


@triton.constexpr_function
def module_output(stage):
    return "attention_out" if stage == 1 else "mlp_out"


@triton.constexpr_function
def module_wait(stage, exchange):
    """The stage's wait for an exchange, as WAITS names it."""
    return f"{'o_proj' if stage == 1 else 'down_proj'} {exchange}"


@triton.constexpr_function
def row_places(S, stage):
    """The block's rows of a module's output, as a power of two."""
    return triton.next_power_of_2(S.stages[stage].block_rows)


@triton.jit
def module_rows(p, S: tl.constexpr, STAGE: tl.constexpr):
    """The block's rows as they leave it, even ones first: row, index in the vector's planes, and which there are."""
    T: tl.constexpr = S.stages[STAGE]
    HALF: tl.constexpr = S.hidden_size // 2
    EACH: tl.constexpr = row_places(S, STAGE) // 2
    i = tl.arange(0, 2 * EACH)
    plane, j = i // EACH, i % EACH
    row = p.group_index * T.block_rows + 2 * j + plane
    at = plane * HALF + p.group_index * (T.block_rows // 2) + j
    return row, at, (2 * j < T.block_rows) & (row < T.rows)


@triton.jit
def pairwise(ys):
    """Tensors, each followed by the next one; the last of an odd number with itself."""
    COUNT: tl.constexpr = len(ys)
    LENGTH: tl.constexpr = ys[0].numel
    pairs = ()
    for i in tl.static_range((COUNT + 1) // 2):
        both = tl.join(ys[2 * i], ys[min(2 * i + 1, COUNT - 1)])
        pairs = pairs + (tl.reshape(tl.trans(both), (2 * LENGTH,)),)
    return pairs


@triton.jit
def in_planes(ys, S: tl.constexpr, STAGE: tl.constexpr):
    """What `wired` gives, a tensor a unit, as one in the order of `module_rows`: what follows is done once."""
    UNITS: tl.constexpr = S.stages[STAGE].units
    PLACES: tl.constexpr = row_places(S, STAGE)
    for _ in tl.static_range((UNITS - 1).bit_length()):
        ys = pairwise(ys)
    return tl.reshape(tl.trans(tl.reshape(ys[0], (PLACES // 2, 2))), (PLACES,))


@triton.jit
def delayed_buffer(it, p, S: tl.constexpr, STAGE: tl.constexpr):
    """The buffer of layer run `it` in the ring of late outputs, every lane's planes, and its phase."""
    buffer, delayed_phase = it % S.delayed_buffers, ((it // S.delayed_buffers) + 1) & 1
    at = (STAGE // 2 * S.delayed_buffers + buffer) * S.lanes * S.hidden_size
    return p.words + S.region("delayed") + at, delayed_phase


@triton.jit
def delayed_words(it, at, valid, p, S: tl.constexpr, STAGE: tl.constexpr):
    """Where the lanes' outputs of layer run `it` stand, [lanes, rows], which are there, and their phase."""
    LANES: tl.constexpr = triton.next_power_of_2(S.lanes)
    base, delayed_phase = delayed_buffer(it, p, S, STAGE)
    j = tl.arange(0, LANES)[:, None]
    return base + j * S.hidden_size + at[None, :], (j < S.lanes) & valid[None, :], delayed_phase


@triton.jit
def ask_reduce(layer, p, S: tl.constexpr, STAGE: tl.constexpr):
    """How the layer reduces a module's outputs; asked for before a wait, used after it."""
    if S.lanes > 1:
        return tl.load(p.reduces + STAGE // 2 * S.num_layers + layer)
    else:
        return 0


@triton.jit
def ask_delayed(how, it, p, S: tl.constexpr, STAGE: tl.constexpr):
    """The other lanes' late outputs for the block's rows, asked for before the multiplication they are added to."""
    if S.delay > 0:
        _, at, valid = module_rows(p, S, STAGE)
        late = valid & (how == DELAYED)
        ptr, mask, delayed_phase = delayed_words(it - S.delay, at, late, p, S, STAGE)
        return load_polled(ptr, mask, delayed_phase, S)
    else:
        return 0


@triton.jit
def add_delayed(y, words, layer, it, alive, p, S: tl.constexpr, STAGE: tl.constexpr):
    """y plus the other lanes' outputs of `delay` layers ago; waits if they were not there when asked for."""
    T: tl.constexpr = S.stages[STAGE]
    HALF: tl.constexpr = S.hidden_size // 2
    LANES: tl.constexpr = triton.next_power_of_2(S.lanes)
    _, at, valid = module_rows(p, S, STAGE)
    ptr, mask, delayed_phase = delayed_words(it - S.delay, at, valid, p, S, STAGE)
    words, bad = poll_on(words, ptr, mask, delayed_phase, alive, p, S)
    if (bad != 0) & (alive != 0):
        base, delayed_phase = delayed_buffer(it - S.delay, p, S, STAGE)
        first = p.group_index * (T.block_rows // 2)  # the block's rows in every lane's two planes
        count = tl.minimum(T.block_rows // 2, HALF - first)
        REASON: tl.constexpr = module_wait(STAGE, "delayed")
        record_timeout(base, 0, delayed_phase, REASON, layer, p)
        record_more(base + first, count, HALF, 2 * S.lanes, p)
    others = mask & (tl.arange(0, LANES) != p.lane)[:, None]
    y += tl.sum(tl.where(others, unpack_f32(settle(words)), 0.0), axis=0)
    return y, tl.where(bad != 0, 0, alive)


@triton.jit
def publish_rows(ys, layer, phase, p, S: tl.constexpr, STAGE: tl.constexpr, COLUMNS: tl.constexpr):
    """Send every column's rows where there are no other lanes: ys [COLUMNS * tile_rows], one a unit.

    One store a unit: putting them together first costs registers (Qwen3-8B, sm_90: 344 bytes of stack, not 56).
    """
    T: tl.constexpr = S.stages[STAGE]
    HALF: tl.constexpr = S.hidden_size // 2
    UNITS: tl.constexpr = T.units
    ROWS: tl.constexpr = T.tile_rows
    i, column = in_columns(ROWS, COLUMNS)
    to = p.words + S.region(module_output(STAGE))
    for u in tl.static_range(UNITS):
        first = p.group_index * T.block_rows + u * ROWS
        row = first + i
        y = biased(ys[u], row, row < T.rows, p.lane, layer, p, S, STAGE)
        if S.outputs_in_pairs:
            publish_pairs(to, first, y, T.rows, phase, S, COLUMNS, True)
        else:
            at = column * S.total_words + (row & 1) * HALF + (row >> 1)
            store_shared(to + at, pack_f32(y, phase), row < T.rows)


@triton.jit
def publish_module(ys, delayed, how, layer, it, phase, alive, p, S: tl.constexpr, STAGE: tl.constexpr):
    """Send the block's rows of a module's output as the layer's reduction asks; returns alive."""
    to = p.words + S.region(module_output(STAGE))
    if S.lanes > 1:
        row, at, valid = module_rows(p, S, STAGE)
        y = biased(in_planes(ys, S, STAGE), row, valid, p.lane, layer, p, S, STAGE)
        raw = y
        if S.delay > 0:
            if how == DELAYED:
                y, alive = add_delayed(y, delayed, layer, it, alive, p, S, STAGE)
        if how == OWN:
            y *= tl.sqrt(S.lanes * 1.0)
        store_shared(to + p.lane * S.hidden_size + at, pack_f32(y, phase), valid)
        if S.delay > 0:  # for other lanes; mostly nobody waits for it, so it comes second
            sent, delayed_phase = delayed_buffer(it, p, S, STAGE)
            store_shared(sent + p.lane * S.hidden_size + at, pack_f32(raw, delayed_phase), valid)
    else:
        publish_rows(ys, layer, phase, p, S, STAGE, 1)
    return alive


@triton.jit
def join(x, how, layer, it, phase, alive, p, S: tl.constexpr, STAGE: tl.constexpr):
    """x plus the module's output, gathered from all blocks of the lane (of all lanes if reduced NOW)."""
    OUTPUT: tl.constexpr = module_output(STAGE)
    REASON: tl.constexpr = module_wait(STAGE, OUTPUT)
    base = p.words + S.region(OUTPUT)
    if S.lanes > 1:
        first, last = tl.where(how == NOW, 0, p.lane), tl.where(how == NOW, S.lanes, p.lane + 1)
        if S.delay > 0:
            # Lanes drift apart: one that needs nobody's output would rewrite its own before all have it.
            sent, delayed_phase = delayed_buffer(it, p, S, STAGE)
            base = tl.where(how == NOW, sent.to(tl.int64), base.to(tl.int64)).to(base.dtype)
            phase = tl.where(how == NOW, delayed_phase, phase)
        for j in range(first, last):
            w, alive = wait_planes(base + j * S.hidden_size, phase, alive, REASON, layer, p, S)
            x = add_planes(x, w, S)
    elif S.outputs_in_pairs:
        T: tl.constexpr = S.stages[0]
        ws, alive = wait_pair_words(base, phase, alive, REASON, layer, p, S, T)
        x = add_planes(x, ws, S)
    else:
        ws, alive = wait_planes(base, phase, alive, REASON, layer, p, S)
        x = add_planes(x, ws, S)
    return x, alive
