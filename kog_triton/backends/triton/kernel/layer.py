"""One layer: its five stages, each a function that the whole step and the single stage (stage.py) share.

    x --rms_norm--> qkv_proj ==> attention ==> o_proj ==> x --rms_norm--> gate_up_proj ==> down_proj ==> x
                            words         words      words                            words          words

A block keeps x in float32, a share in each thread; for a multiplication it is normed and rounded to 16 bits.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.attention import ask_constants, attention
from kog_triton.backends.triton.kernel.matvec import rowwise, wired
from kog_triton.backends.triton.kernel.residual import (
    ask_delayed,
    ask_reduce,
    bias_at,
    join,
    load_gains,
    module_wait,
    publish_module,
    rms_norm,
    rounded,
    silu,
    stage_input,
)
from kog_triton.backends.triton.kernel.sync import fence, stamp
from kog_triton.backends.triton.kernel.words import fine_pairs, in_columns, publish_pairs, wait_pairs

POINTS = (
    "start", "qkv_proj", "attention words", "one_head", "join_splits", "attention gathered", "o_proj",
    "o_proj joined", "gate_up_proj", "mlp gathered", "down_proj", "down_proj joined",
)  # fmt: skip


# ---- epilogues of the stages that read x: y [tile_rows] of one row tile ----


@triton.jit
def row_biases(bias, row, T: tl.constexpr, COLUMNS: tl.constexpr):
    """Of a row tile that begins at `row`, the same in every column."""
    r = row + in_columns(T.tile_rows, COLUMNS)[0]
    return tl.load(bias + r, mask=r < T.rows, other=0.0)


@triton.jit
def store_qkv(y, to, unit, out, S: tl.constexpr, COLUMNS: tl.constexpr):
    T: tl.constexpr = S.stages[0]
    bias, first, phase = out
    row = first + unit * T.tile_rows
    if S.qkv_bias:
        if T.units == 1:
            y += bias
        else:
            y += row_biases(bias, row, T, COLUMNS)
    publish_pairs(to, row, y, T.rows, phase, S, COLUMNS, fine_pairs(S, 0))


@triton.jit
def silu_mul(y, to, unit, out, S: tl.constexpr, COLUMNS: tl.constexpr):
    T: tl.constexpr = S.stages[2]
    bias, first, phase = out
    row = first + unit * T.tile_rows
    if S.mlp_bias:
        y += row_biases(bias, row, T, COLUMNS)
    gate, up = tl.split(tl.reshape(y, (y.numel // 2, 2)))
    value = silu(gate) * up
    publish_pairs(to, row // 2, value, T.rows // 2, phase, S, COLUMNS, fine_pairs(S, 3))


# ---- stages ----


@triton.jit
def qkv_proj(stream, xs, layer, phase, p, S: tl.constexpr, COLUMNS: tl.constexpr):
    """Publish the block's rows of q, k and v; returns the weight stream (matvec.py)."""
    T: tl.constexpr = S.stages[0]
    words = p.words + S.region("qkv") + p.lane * S.qkv_words
    bias = p.biases + bias_at(S, layer, 0) + p.lane * T.rows
    first = p.group_index * T.block_rows
    if S.qkv_bias and T.units == 1:  # asked for ahead of the only tile's products
        bias = row_biases(bias, first, T, COLUMNS)
    out = (bias, first, phase)
    return rowwise(stream, xs, words, out, p, S, 0, store_qkv, COLUMNS)


@triton.jit
def gate_up_proj(stream, xs, layer, phase, p, S: tl.constexpr, COLUMNS: tl.constexpr):
    """Publish the block's rows of silu(gate) * up; returns the weight stream."""
    T: tl.constexpr = S.stages[2]
    words = p.words + S.region("mlp") + p.lane * (S.ffn // 2)
    bias = p.biases + bias_at(S, layer, 2) + p.lane * T.rows
    out = (bias, p.group_index * T.block_rows, phase)
    return rowwise(stream, xs, words, out, p, S, 2, silu_mul, COLUMNS)


@triton.jit
def module(x, layer, it, stream, phase, alive, p, S: tl.constexpr, STAGE: tl.constexpr):
    """Attention's output through o_proj (STAGE 1), or the gated values through down_proj (3), into x.

    Returns x, the gains of the next norm, the weight stream and alive.
    """
    T: tl.constexpr = S.stages[STAGE]
    INPUT: tl.constexpr = stage_input(STAGE)
    REASON: tl.constexpr = module_wait(STAGE, INPUT)
    POINT: tl.constexpr = 2 * STAGE + 3  # "gathered", and the stage after it, in POINTS
    how = ask_reduce(layer, p, S, STAGE)
    words = p.words + S.region(INPUT) + p.lane * (T.cols // 2)
    xs, alive = wait_pairs(words, phase, alive, REASON, layer, p, S, STAGE)
    stamp(p, it, POINT, S)
    delayed = ask_delayed(how, it, p, S, STAGE)
    ys, stream = wired(stream, xs, p, S, STAGE, 1)
    stamp(p, it, POINT + 1, S)
    if STAGE == 3:
        if layer == S.num_layers - 1:
            # This token's rows of the cache; pairs with the fence at the start of the next token.
            fence(p.fences + p.block * 32, S)
    alive = publish_module(ys, delayed, how, layer, it, phase, alive, p, S, STAGE)
    gains = load_gains(2 * layer + 1 + STAGE // 2, p, S)
    x, alive = join(x, how, layer, it, phase, alive, p, S, STAGE)
    return x, gains, stream, alive


@triton.jit
def run_layer(layer, it, pos, slot, stream, x, gains, alive, p, S: tl.constexpr):
    """One layer: x and the gains of its norm in, those of the next out, the weight stream and alive."""
    phase = (it + 1) & 1
    stamp(p, it, 0, S)
    constants = ask_constants(layer, pos, p, S)
    xs = rounded(rms_norm(x, gains, S), S, 0)
    stream = qkv_proj(stream, xs, layer, phase, p, S, 1)
    stamp(p, it, 1, S)
    alive = attention(constants, layer, it, pos, slot, phase, alive, p, S)
    stamp(p, it, 4, S)
    x, gains, stream, alive = module(x, layer, it, stream, phase, alive, p, S, 1)
    stamp(p, it, 7, S)
    xs = rounded(rms_norm(x, gains, S), S, 2)
    stream = gate_up_proj(stream, xs, layer, phase, p, S, 1)
    stamp(p, it, 8, S)
    x, gains, stream, alive = module(x, layer, it, stream, phase, alive, p, S, 3)
    stamp(p, it, 11, S)
    return x, gains, stream, alive
