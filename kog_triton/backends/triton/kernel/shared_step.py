"""Steps that several requests share: a column each, whose weights are read once for all.

    feed > qkv_proj > splits > heads > o_proj > feed > gate_up_proj > down_proj > feed ...     then lm_head, and choices

A column has words and a row of logits of its own (`at_column`), in which the functions of the step for one request
work, in their order of sums: a request gets the same bits alone and among others. Nobody waits for a word: after every
part of a layer all blocks meet. `feed` adds a module's output to the residual stream and norms it; every block has the
stream of one column, which as many others have too, and operands are read from memory by all.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.attention import ask_constants, join_heads, walk_splits
from kog_triton.backends.triton.kernel.chunk import gather
from kog_triton.backends.triton.kernel.head import (
    choose,
    head_rows,
    keep,
    no_candidate,
    store_logits,
)
from kog_triton.backends.triton.kernel.layer import gate_up_proj, qkv_proj
from kog_triton.backends.triton.kernel.matvec import first_tiles, outputs, rowwise, wired
from kog_triton.backends.triton.kernel.pointers import Pointers
from kog_triton.backends.triton.kernel.residual import (
    join,
    load_embedding,
    load_gains,
    module_input,
    publish_rows,
    rms_norm,
    rounded,
)
from kog_triton.backends.triton.kernel.sample import argmax, publish_candidate
from kog_triton.backends.triton.kernel.slots import (
    EXPIRED_ID,
    POSITION,
    TOKEN,
    YIELD,
    advance,
    ask_host,
    beat,
    field,
    request_of,
    state_of,
)
from kog_triton.backends.triton.kernel.sync import meet, stamp
from kog_triton.backends.triton.kernel.words import diagnose_timeout, plane_index, plane_tiles

WORDS: tl.constexpr = tl.constexpr(Pointers._fields.index("words"))
LOGITS: tl.constexpr = tl.constexpr(Pointers._fields.index("logits"))
MEETINGS: tl.constexpr = tl.constexpr(8)  # of a layer
POINTS = (  # that are stamped; the last meeting and down_proj's join end where the next layer starts
    "start", "operands stored", "met", "qkv_proj", "met", "splits walked", "met", "splits joined", "met", "o_proj",
    "met", "o_proj joined, operands stored", "met", "gate_up_proj", "met", "down_proj",
)  # fmt: skip


@triton.jit
def at_column(p, column, S: tl.constexpr):
    """The pointers, with the words and logits of a column."""
    words, logits = p.words + column * S.total_words, p.logits + column * S.vocab_size
    return Pointers(*p[:WORDS], words, *p[WORDS + 1 : LOGITS], logits, *p[LOGITS + 1 :])


@triton.jit
def pick(values, column):
    """One of the columns' int32 values."""
    i = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(i == column, values, 0), axis=0)


@triton.jit
def store_operands(x, gains, own, block, p, S: tl.constexpr, COLUMNS: tl.constexpr):
    """The normed stream of the block's column, as matrices read it; blocks of one column store a part each."""
    HALF: tl.constexpr = S.hidden_size // 2
    EACH: tl.constexpr = S.num_blocks // COLUMNS
    xs = rounded(rms_norm(x, gains, S), S)
    to = p.words + own * S.total_words + S.region("x")
    for c in tl.static_range(plane_tiles(S)):
        j = plane_index(c, S)
        mine = (j < HALF) & (j * EACH // HALF == block // COLUMNS)
        tl.store(to + j, xs[c], mask=mine)


@triton.jit
def shared_module(
    stream, layer, coords, alive, p, S: tl.constexpr, STAGE: tl.constexpr, COLUMNS: tl.constexpr
):
    """Every column's rows of o_proj (STAGE 1) or down_proj (3); the weight stream."""
    INPUT: tl.constexpr = module_input(STAGE)
    xs = p.words + S.region(INPUT)
    sums, rests, stream = wired(stream, xs, S, STAGE, COLUMNS)
    ys = outputs(sums, rests, S, STAGE, COLUMNS)
    publish_rows(ys, layer, coords, None, p, S, STAGE, COLUMNS)
    return stream, alive


@triton.jit
def run_shared_layers(
    slots,
    pos,
    tokens,
    count,
    number,
    control,
    coords,
    stream,
    alive,
    p,
    S: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A token of every column through all layers: operands of lm_head in memory, the tiles fetched behind, alive."""
    base, behind, block, fetched = stream
    _, lane, group_index = coords
    APART: tl.constexpr = max(1, S.splits // COLUMNS)
    own = block % COLUMNS
    mine = at_column(p, own, S)
    gains = load_gains(0, lane, p, S)
    x = load_embedding(pick(tokens, own), p, S)
    heard = control * 0
    for layer in tl.range(S.num_layers, disable_licm=True):
        next_base = tl.where(
            layer == S.num_layers - 1, behind.to(tl.int64), (base + S.layer_words).to(tl.int64)
        ).to(base.dtype)
        stream = (base, tl.multiple_of(next_base, 16), block, fetched)
        it = number // MEETINGS
        stamp(p, it, 0, S)
        store_operands(x, gains, own, block, p, S, COLUMNS)
        stamp(p, it, 1, S)
        heard, alive = gather(number, control, layer, alive, block, p, S)
        stamp(p, it, 2, S)
        stream = qkv_proj(stream, p.words + S.region("x"), layer, coords, None, p, S, COLUMNS)
        stamp(p, it, 3, S)
        heard, alive = gather(number + 1, control, layer, alive, block, p, S)
        stamp(p, it, 4, S)
        for column in range(count):
            # Splits that are not in use are other blocks' in every column.
            apart = (block, lane, (group_index + column * APART) % S.group)
            at, slot = pick(pos, column), pick(slots, column)
            constants = ask_constants(layer, at, p, S)
            here = at_column(p, column, S)
            alive = walk_splits(constants, layer, 0, at, slot, apart, None, alive, here, S)
        stamp(p, it, 5, S)
        heard, alive = gather(number + 2, control, layer, alive, block, p, S)
        stamp(p, it, 6, S)
        for column in range(count):
            apart = (block, lane, (group_index + column * APART) % S.group)
            at = pick(pos, column)
            constants = (tl.load(p.windows + layer),)
            here = at_column(p, column, S)
            alive = join_heads(constants, layer, at, apart, None, alive, here, S)
        stamp(p, it, 7, S)
        heard, alive = gather(number + 3, control, layer, alive, block, p, S)
        stamp(p, it, 8, S)
        stream, alive = shared_module(stream, layer, coords, alive, p, S, 1, COLUMNS)
        gains = load_gains(2 * layer + 1, lane, p, S)
        stamp(p, it, 9, S)
        heard, alive = gather(number + 4, control, layer, alive, block, p, S)
        stamp(p, it, 10, S)
        x, alive = join(x, 0, layer, 0, lane, None, alive, mine, S, 1)
        store_operands(x, gains, own, block, p, S, COLUMNS)
        stamp(p, it, 11, S)
        heard, alive = gather(number + 5, control, layer, alive, block, p, S)
        stamp(p, it, 12, S)
        stream = gate_up_proj(stream, p.words + S.region("x"), layer, coords, None, p, S, COLUMNS)
        stamp(p, it, 13, S)
        heard, alive = gather(number + 6, control, layer, alive, block, p, S)
        stamp(p, it, 14, S)
        stream, alive = shared_module(stream, layer, coords, alive, p, S, 3, COLUMNS)
        gains = load_gains(2 * layer + 2, lane, p, S)
        stamp(p, it, 15, S)
        heard, alive = gather(number + 7, control, layer, alive, block, p, S)
        x, alive = join(x, 0, layer, 0, lane, None, alive, mine, S, 3)
        number += MEETINGS
        fetched = stream[3]
        base = base + S.layer_words
    store_operands(x, gains, own, block, p, S, COLUMNS)
    heard, alive = gather(number, control, S.num_layers, alive, block, p, S)
    return number + 1, heard, fetched, alive


@triton.jit
def shared_kernel(p, S: tl.constexpr, COLUMNS: tl.constexpr, RULES: tl.constexpr):
    """Serve the slots that `p.slot_order` lists, at most COLUMNS, a token each a step, until one of them has ended."""
    tl.static_assert(S.lanes == 1, "lanes share no step")
    block = tl.program_id(0)
    coords = (block, block // S.group, block % S.group)
    zero = block * 0  # a tensor also in the interpreter
    alive, stays, number, steps = zero + 1, zero + 1, zero, zero
    layers = p.weights + tl.zeros((), tl.int64)
    head = layers + S.num_layers * S.layer_words
    count = tl.load(p.slot_order)
    i = tl.arange(0, COLUMNS)
    slots = tl.load(p.slot_order + 1 + tl.minimum(i, count - 1))
    states, requests = state_of(slots, block, p, S), request_of(slots, p, S)
    prompts = tl.load(requests + field("prompt"))
    fetched = first_tiles(layers, block, S, 0)
    while (stays != 0) & (alive != 0):
        pos, tokens = tl.load(states + POSITION), tl.load(states + TOKEN)
        scores = tl.max((pos + 1 >= prompts).to(tl.int32), axis=0)
        control = ask_host(block, p, S)
        behind = tl.where(scores != 0, head.to(tl.int64), layers.to(tl.int64)).to(head.dtype)
        stream = (layers, tl.multiple_of(behind, 16), block, fetched)
        number, control, fetched, alive = run_shared_layers(
            slots, pos, tokens, count, number, control, coords, stream, alive, p, S, COLUMNS
        )
        if scores != 0:
            first, _, vocab_first = head_rows(coords, S)
            out = (first, vocab_first, 0)
            stream = (head, layers, block, fetched)
            xs = p.words + S.region("x")
            stream = rowwise(stream, xs, p.logits, out, S, 4, store_logits, COLUMNS, S.vocab_size)
            fetched = stream[3]
        for column in range(count):
            epoch = steps * COLUMNS + column + 1
            slot = tl.load(p.slot_order + 1 + column)
            here = at_column(p, column, S)
            best, best_id = no_candidate(block)
            scored = pick(pos, column) + 1 >= pick(prompts, column)
            if scored:
                best, best_id, alive = choose(
                    pick(pos, column) + 1, epoch, slot, coords, alive, here, S, RULES
                )
            publish_candidate(best, best_id, zero, epoch, alive, block, p, S)
            token, _, alive = argmax(epoch, alive, p, S)
            if RULES:
                if scored:
                    alive = keep(token, epoch, slot, coords, alive, here, S)
            outcome = advance(token, alive, slot, block, p, S)
            stays = tl.where((outcome != 0) | (token == EXPIRED_ID), 0, stays)
        steps += 1
        beat(tl.where(alive == 0, steps - 1, steps), block, p, S)
        stays = tl.where(control == YIELD, 0, stays)
        meet(S)  # the block's own outcomes, which other threads wrote
    if alive == 0:
        diagnose_timeout(p, S)
