"""Prompts in chunks: a pass takes up to `columns` tokens of one slot through all layers; a prompt's last is not for it.

    feed > qkv_proj > attend > o_proj > feed > gate_up_proj > down_proj > feed ...

`feed` adds a module's output to the residual stream and norms it, a token a block; after every step all blocks meet,
and each sees what all of them wrote. The pass ends with the last layer's keys and values: nothing reads the rest.
All prompts come before the first token, so that the rest of the kernel is as it is without them; a pass is where the
host's word is obeyed, so that a prompt is always cut at the same places.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.chunk_attention import attend
from kog_triton.backends.triton.kernel.columns import (
    begins,
    multiply,
    out_rows,
    parts,
    store_gated,
    store_out,
    store_qkv,
    vectors,
)
from kog_triton.backends.triton.kernel.embedding import embedded
from kog_triton.backends.triton.kernel.residual import DELAYED, OWN, ask_reduce, biased
from kog_triton.backends.triton.kernel.slots import (
    ALL_LOGITS,
    OUTCOME,
    POSITION,
    TOKEN,
    YIELD,
    ask_host,
    beat,
    field,
    request_of,
    state_of,
)
from kog_triton.backends.triton.kernel.sync import meet, order, store_shared
from kog_triton.backends.triton.kernel.words import in_range, settle, wait_all

STEPS: tl.constexpr = tl.constexpr(7)  # of a layer
# Tokens that get a pass of their own. It takes as long as two passes of one token (Llama-3.2-1B on one H200: 1.05 ms,
# 0.69 each: benchmarks/triton-log.md#prompts); as the sums differ in their last bits, the shortest prompts are left as
# they were.
CHUNKS_FROM: tl.constexpr = tl.constexpr(4)
# Of a block, at most: several of its threads hold each element of a vector that is shorter.
MOST_THREADS: tl.constexpr = tl.constexpr(1024)


@triton.jit
def gather(number, say, layer, alive, p, S: tl.constexpr):
    """All blocks are here, and each sees what all wrote before: what block 0 says, and alive; `number` counts."""
    NB: tl.constexpr = triton.next_power_of_2(S.num_blocks)
    order(p.fences + p.block * 32, S)
    # Two buffers: who arrives at n + 1 may be ahead of who still reads n, but of nobody by two.
    arrivals = p.words + S.region("arrivals") + (number & 1) * S.num_blocks
    phase = ((number >> 1) + 1) & 1
    store_shared(arrivals + p.block, (say << 1) | phase)
    i = tl.arange(0, NB)
    ptrs, masks = ((arrivals + i)[:, None],), ((i < S.num_blocks)[:, None],)
    ws, alive = wait_all(ptrs, masks, arrivals, S.num_blocks, phase, alive, "meeting arrivals", layer, p, S)
    said = tl.max(settle(ws[0]), axis=1)
    order(p.fences + p.block * 32, S)
    return tl.sum(tl.where(i == 0, said, 0), axis=0) >> 1, alive


# ---- the residual stream ----


@triton.jit
def sent(layer, lane, t, i, inside, p, S: tl.constexpr, STAGE: tl.constexpr):
    """A lane's output of a module for token t: float32 [n]."""
    PARTS: tl.constexpr = parts(S, STAGE)
    y = tl.zeros((i.numel,), tl.float32)
    for part in tl.static_range(PARTS):
        rows = out_rows(layer, part, lane, p, S, STAGE) + t * S.hidden_size
        y += tl.load(rows + i, mask=inside, other=0.0)
    return biased(y, i, inside, lane, layer, p, S, STAGE)


@triton.jit
def received(layer, lane, t, i, inside, p, S: tl.constexpr, STAGE: tl.constexpr):
    """What joins a lane's stream, as the layer reduces the module's outputs."""
    y = sent(layer, lane, t, i, inside, p, S, STAGE)
    if S.lanes > 1:
        how = ask_reduce(layer, p, S, STAGE)
        y = tl.where(how == OWN, y * tl.sqrt(S.lanes * 1.0), y)
        source = tl.where(how == DELAYED, layer - S.delay, layer)
        for other in range(tl.where(how == OWN, S.lanes, 0), S.lanes):
            if other != lane:
                y += sent(source, other, t, i, inside, p, S, STAGE)
    return y


@triton.jit
def feed(pos, count, slot, layer, p, S: tl.constexpr, STAGE: tl.constexpr):
    """The vectors that qkv_proj (STAGE 0) or gate_up_proj (2) reads: the stream, joined by what came before, normed."""
    HIDDEN: tl.constexpr = triton.next_power_of_2(S.hidden_size)
    AT: tl.constexpr = begins(S, "stream")
    HALF: tl.constexpr = S.hidden_size // 2
    i = tl.arange(0, HIDDEN)
    inside = i < S.hidden_size
    for vector in range(p.block, S.lanes * count, S.num_blocks):
        lane, t = vector // count, vector % count
        stream = p.chunk + AT + (lane * S.columns + t) * S.hidden_size + i
        if STAGE == 2:
            x = tl.load(stream, mask=inside, other=0.0)
            x += received(layer, lane, t, i, inside, p, S, 1)
        elif layer == 0:
            token = tl.load(p.tokens + slot * (S.max_context + 1) + pos + t)
            x = embedded(token, i, p, S)
        else:
            x = tl.load(stream, mask=inside, other=0.0)
            x += received(layer - 1, lane, t, i, inside, p, S, 3)
        if HIDDEN < MOST_THREADS:
            tl.debug_barrier()  # several threads hold an element: all have read theirs
        tl.store(stream, x, mask=inside)
        norm = 2 * layer + STAGE // 2
        if S.lane_norms:
            norm = norm * S.lanes + lane
        gains = p.gains + norm * S.hidden_size + (i & 1) * HALF + (i >> 1)
        scale = tl.rsqrt(tl.sum(x * x) / S.hidden_size + S.norm_eps)
        x = in_range(x * scale * tl.load(gains, mask=inside, other=0.0), S)
        to = vectors("x", lane, t, p, S) + i
        tl.store(to, x.to(p.half_chunk.dtype.element_ty), mask=inside)


# ---- passes ----


@triton.jit
def run_step(step, layer, pos, count, slot, p, S: tl.constexpr):
    """One step of a layer."""
    if step == 0:
        feed(pos, count, slot, layer, p, S, 0)
    elif step == 1:
        multiply(layer, count, p, S, 0, store_qkv)
    elif step == 2:
        attend(layer, pos, count, slot, p, S)
    elif step == 3:
        multiply(layer, count, p, S, 1, store_out)
    elif step == 4:
        feed(pos, count, slot, layer, p, S, 2)
    elif step == 5:
        multiply(layer, count, p, S, 2, store_gated)
    else:
        multiply(layer, count, p, S, 3, store_out)


@triton.jit
def run_chunk(pos, count, slot, number, alive, p, S: tl.constexpr):
    """Keys and values of `count` tokens from `pos` on: the number of the next meeting, the host's word, alive."""
    zero = p.block * 0  # a tensor also in the interpreter
    control = ask_host(p, S)
    heard = zero
    for i in tl.range(STEPS * (S.num_layers - 1) + 3, disable_licm=True):
        step = zero + i
        layer = step // STEPS
        run_step(step % STEPS, layer, pos, count, slot, p, S)
        heard, alive = gather(number, control, layer, alive, p, S)
        number += 1
    return number, heard, alive


@triton.jit
def run_prompts(alive, p, S: tl.constexpr):
    """All slots' prompts, until each has less than CHUNKS_FROM tokens left: alive, 0 if the host wants us to leave."""
    zero = p.block * 0
    entry, number, stays = zero, zero, zero + 1
    slots = tl.load(p.slot_order)
    while (entry < slots) & (stays != 0) & (alive != 0):
        slot = tl.load(p.slot_order + 1 + entry)
        own, request = state_of(slot, p, S), request_of(slot, p, S)
        pos = tl.load(own + POSITION)
        ahead = tl.load(request + field("prompt")) - 1 - pos
        scores = (tl.load(request + field("flags")) & ALL_LOGITS) != 0
        if (ahead < CHUNKS_FROM) | scores | (tl.load(own + OUTCOME) != 0):
            entry += 1
        else:
            count = tl.minimum(ahead, S.columns)
            number, control, alive = run_chunk(pos, count, slot, number, alive, p, S)
            beat(-number, p, S)
            if alive != 0:  # else keys and values of this chunk are void
                token = tl.load(p.tokens + slot * (S.max_context + 1) + pos + count)
                tl.store(own + POSITION, pos + count)
                tl.store(own + TOKEN, token)
            meet(S)  # other threads of the block read them
            stays = tl.where(control == YIELD, 0, stays)
    return alive, stays


@triton.jit(noinline=True)
def run_prompts_apart(alive, p, S: tl.constexpr):
    """`run_prompts` as a function that is called: in line, its registers would be taken from the rest of the kernel."""
    return run_prompts(alive, p, S)
