"""The megakernel's second entry point: one stage of one token, by the functions that the whole step is made of.

The words arena holds what a stage reads from other blocks, as they would have left it, and what the stage publishes
stays there; the residual stream comes and goes as float32 planes. host/stages.py is the host's side.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.attention import ask_constants, attention
from kog_triton.backends.triton.kernel.embedding import load_embedding
from kog_triton.backends.triton.kernel.head import (
    CONCAT,
    VOCAB_PARALLEL,
    head_rows,
    mix_lanes,
    score,
    score_lanes,
    send_part,
    store_logits,
)
from kog_triton.backends.triton.kernel.layer import gate_up_proj, module, qkv_proj
from kog_triton.backends.triton.kernel.matvec import first_tiles, rowwise
from kog_triton.backends.triton.kernel.pointers import given
from kog_triton.backends.triton.kernel.residual import load_gains, rms_norm, rounded
from kog_triton.backends.triton.kernel.words import diagnose_timeout, plane_index, plane_tiles


@triton.jit
def load_stream(x, p, S: tl.constexpr):
    """Planes of float32 [lanes, 2, hidden / 2]."""
    HALF: tl.constexpr = S.hidden_size // 2
    out = ()
    for c in tl.static_range(2 * plane_tiles(S)):
        j = plane_index(c // 2, S)
        at = x + p.lane * S.hidden_size + c % 2 * HALF
        out = out + (tl.load(at + j, mask=j < HALF, other=0.0),)
    return out


@triton.jit
def store_stream(out, x, p, S: tl.constexpr):
    """Planes x to `out`, as `load_stream` reads them; by one block of the lane."""
    HALF: tl.constexpr = S.hidden_size // 2
    for c in tl.static_range(2 * plane_tiles(S)):
        j = plane_index(c // 2, S)
        at = out + p.lane * S.hidden_size + c % 2 * HALF
        tl.store(at + j, x[c], mask=(j < HALF) & (p.group_index == 0))


@triton.jit
def stage_kernel(p, x, out, layer, position, token, STAGE: tl.constexpr, S: tl.constexpr):
    """Stage STAGE of `layer` for one token, as layer run `layer` of a first pass; streams from `x`, to `out`."""
    p = given(p, S)
    zero = p.block * 0  # a tensor also in the interpreter
    alive = zero + 1
    layer, position, token = layer + zero, position + zero, token + zero  # tensors: Triton compiles in a 1
    phase = (layer + 1) & 1
    layers = p.weights + tl.zeros((), tl.int64)
    base = layers + layer * S.layer_words
    head = layers + S.num_layers * S.layer_words
    stream = load_stream(x, p, S)
    if STAGE == "embed":
        stream = load_embedding(token, p, S)
        store_stream(out, stream, p, S)
    elif STAGE == "qkv_proj":
        gains = load_gains(2 * layer, p, S)
        weights = (base, base, first_tiles(base, p, S, 0))
        xs = rounded(rms_norm(stream, gains, S), S, 0)
        qkv_proj(weights, xs, layer, phase, p, S, 1)
    elif STAGE == "attention":
        constants = ask_constants(layer, position, p, S)
        alive = attention(constants, layer, layer, position, zero, phase, alive, p, S)
    elif STAGE == "o_proj" or STAGE == "down_proj":
        N: tl.constexpr = 1 if STAGE == "o_proj" else 3
        weights = (base, base, first_tiles(base, p, S, N))
        stream, _, _, alive = module(stream, layer, layer, weights, phase, alive, p, S, N)
        store_stream(out, stream, p, S)
    elif STAGE == "gate_up_proj":
        gains = load_gains(2 * layer + 1, p, S)
        weights = (base, base, first_tiles(base, p, S, 2))
        xs = rounded(rms_norm(stream, gains, S), S, 2)
        gate_up_proj(weights, xs, layer, phase, p, S, 1)
    elif STAGE == "mix":
        gains = load_gains(2 * S.num_layers, p, S)
        if S.head_mode == CONCAT:
            send_part(stream, gains, 1, p, S)
        else:
            stream, alive = mix_lanes(stream, gains, 1, alive, p, S)
            store_stream(out, stream, p, S)
    else:
        tl.static_assert(STAGE == "lm_head", "no such stage")
        weights = (head, head, first_tiles(head, p, S, 0))
        if S.lanes == 1 or S.head_mode == VOCAB_PARALLEL:
            gains = load_gains(2 * S.num_layers, p, S)
            weights, alive = score(stream, gains, zero, zero, weights, alive, p, S)
        elif S.head_mode == CONCAT:
            first, _, _ = head_rows(p, S)
            weights, alive = score_lanes(stream, p.logits, first, weights, 1, alive, p, S)
        else:
            first, _, vocab_first = head_rows(p, S)
            xs = rounded(stream, S, 4)
            rowwise(weights, xs, p.logits, (first, vocab_first, 0), p, S, 4, store_logits, 1)
    if alive == 0:
        diagnose_timeout(p, S)
