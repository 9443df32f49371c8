"""Steps that several requests share: a column each, whose weights are read once for all.

    feed > qkv_proj > splits > heads > o_proj > feed > gate_up_proj > down_proj > feed ...     then lm_head, and choices

With narrow weights `prepare` comes before o_proj and down_proj.

A column has words and a row of logits of its own (`at_column`), in which the functions of the step for one request
work, in their order of sums: a request gets the same bits alone and among others. Nobody waits for a word: after every
part of a layer all blocks meet. `feed` adds a module's output to the residual stream and norms it; every block has the
stream of one column, which as many others have too, and operands are read from memory by all. Those of narrow weights
are made once (codes.parts_of): by who norms the stream, and of what attention and gate_up_proj leave by `prepare`.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.attention import ask_constants, join_heads, walk_splits
from kog_triton.backends.triton.kernel.chunk import gather
from kog_triton.backends.triton.kernel.codes import store_parts
from kog_triton.backends.triton.kernel.embedding import load_embedding
from kog_triton.backends.triton.kernel.head import choose, head_rows, keep, no_candidate, of_head, store_logits
from kog_triton.backends.triton.kernel.layer import gate_up_proj, qkv_proj
from kog_triton.backends.triton.kernel.matvec import either, first_tiles, kept, rowwise, wired
from kog_triton.backends.triton.kernel.pointers import Given, given
from kog_triton.backends.triton.kernel.residual import join, load_gains, publish_rows, rms_norm, rounded, stage_input
from kog_triton.backends.triton.kernel.sample import argmax
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
from kog_triton.backends.triton.kernel.words import diagnose_timeout, index, nth, plane_index, plane_tiles

WORDS: tl.constexpr = tl.constexpr(Given._fields.index("words"))
LOGITS: tl.constexpr = tl.constexpr(Given._fields.index("logits"))
LAYER_PARTS: tl.constexpr = tl.constexpr(8)  # of a layer, each of which ends in a meeting
POINTS = (  # that are stamped; the last meeting and down_proj's join end where the next layer starts
    "start", "operands stored", "met", "qkv_proj", "met", "splits walked", "met", "splits joined", "met", "o_proj",
    "met", "o_proj joined, operands stored", "met", "gate_up_proj", "met", "down_proj",
)  # fmt: skip
# Of narrow weights o_proj's and down_proj's begin with `prepare` and the meeting behind it.


@triton.jit
def at_column(p, column, group_index, S: tl.constexpr):
    """As block `group_index` of its lane, with the words and logits of a column."""
    words, logits = p.words + column * S.total_words, p.logits + column * S.vocab_size
    return Given(*p[:2], group_index, *p[3:WORDS], words, *p[WORDS + 1 : LOGITS], logits, *p[LOGITS + 1 :])


@triton.constexpr_function
def operands_of(S, stage):
    """The region in which all blocks read what o_proj or down_proj multiplies."""
    return S.region(stage_input(stage) + "_operands" * S.stages[stage].is_narrow)


@triton.jit
def store_operands(x, gains, own, p, S: tl.constexpr, STAGE: tl.constexpr, COLUMNS: tl.constexpr):
    """The normed stream of the block's column, as STAGE reads it; blocks of one column store a part each."""
    T: tl.constexpr = S.stages[STAGE]
    HALF: tl.constexpr = S.hidden_size // 2
    EACH: tl.constexpr = S.num_blocks // COLUMNS
    xs = rounded(rms_norm(x, gains, S), S, STAGE)
    to = p.words + own * S.total_words + S.region("x")
    for c in tl.static_range(plane_tiles(S)):
        if T.is_narrow:
            if c % EACH == p.block // COLUMNS:
                store_parts(to + T.operands_before(c), kept(xs[c], S, STAGE, c))
        else:
            j = plane_index(c, S)
            mine = (j < HALF) & (j * EACH // HALF == p.block // COLUMNS)
            tl.store(to + j, xs[c], mask=mine)


@triton.jit
def prepare(count, p, S: tl.constexpr, STAGE: tl.constexpr):
    """Operands of o_proj (STAGE 1) or down_proj (3), of the words that were published: a column's tile a block."""
    T: tl.constexpr = S.stages[STAGE]
    RUNS: tl.constexpr = T.runs
    for run in tl.static_range(len(RUNS)):
        prepare_run(count, p, S, STAGE, RUNS[run][0], RUNS[run][1])


@triton.jit
def prepare_run(count, p, S: tl.constexpr, STAGE: tl.constexpr, FIRST: tl.constexpr, TILES: tl.constexpr):
    """`prepare` for TILES tiles along K, as wide as tile FIRST."""
    T: tl.constexpr = S.stages[STAGE]
    FROM: tl.constexpr = S.region(stage_input(STAGE))
    TO: tl.constexpr = operands_of(S, STAGE) + T.operands_before(FIRST)
    for task in range(p.block, count * TILES, S.num_blocks):
        words, tile = p.words + task // TILES * S.total_words, task % TILES
        j = T.first_word(FIRST) + tile * T.widths[FIRST] + index(T.widths[FIRST])
        x = tl.load(words + FROM + j, mask=j < T.cols // 2, other=0)
        store_parts(words + TO + tile * T.operand_words(FIRST), kept(x, S, STAGE, FIRST))


@triton.constexpr_function
def meetings(S, part):
    """Meetings of a layer before the one that ends part `part`; of LAYER_PARTS, all of them."""
    prepared = (S.stages[1].is_narrow and part > 3) + (S.stages[3].is_narrow and part > 6)
    return part + prepared


@triton.jit
def layer_run(number, S: tl.constexpr):
    """Layers that have run before the one whose first meeting is `number`: a step has a meeting behind its last one."""
    EACH: tl.constexpr = meetings(S, LAYER_PARTS)
    steps = number // (S.num_layers * EACH + 1)
    return (number - steps) // EACH


@triton.jit
def met(number, PART: tl.constexpr, say, layer, alive, p, S: tl.constexpr):
    """Alive, after the meeting behind part PART of a layer; `number` is that of the layer's first one."""
    run = layer_run(number, S)
    stamp(p, run, 2 * PART + 1, S)
    _, alive = gather(number + meetings(S, PART), say, layer, alive, p, S)
    if PART < LAYER_PARTS - 1:
        stamp(p, run, 2 * PART + 2, S)
    return alive


@triton.jit
def shared_module(stream, count, number, layer, alive, p, S: tl.constexpr, STAGE: tl.constexpr, COLUMNS: tl.constexpr):
    """Publish every column's rows of o_proj (STAGE 1) or down_proj (3); the weight stream, and alive.

    `number` is that of the layer's first meeting.
    """
    if S.stages[STAGE].is_narrow:
        prepare(count, p, S, STAGE)
        BEFORE: tl.constexpr = meetings(S, 4 if STAGE == 1 else 7) - 1
        _, alive = gather(number + BEFORE, 0, layer, alive, p, S)
    ys, stream = wired(stream, p.words + operands_of(S, STAGE), p, S, STAGE, COLUMNS)
    publish_rows(ys, layer, None, p, S, STAGE, COLUMNS)
    return stream, alive


@triton.jit
def run_shared_layers(columns, count, number, control, stream, alive, p, S: tl.constexpr, COLUMNS: tl.constexpr):
    """A token of every column through all layers: operands of lm_head in memory, the tiles fetched behind, alive."""
    slots, pos, tokens = columns
    base, behind, fetched = stream
    APART: tl.constexpr = max(1, S.splits // COLUMNS)
    own = p.block % COLUMNS
    mine = at_column(p, own, p.group_index, S)
    gains = load_gains(0, p, S)
    x = load_embedding(nth(tokens, own), p, S)
    operands = p.words + S.region("x")
    for layer in tl.range(S.num_layers, disable_licm=True):
        stream = (base, either(layer == S.num_layers - 1, behind, base + S.layer_words), fetched)
        stamp(p, layer_run(number, S), 0, S)
        store_operands(x, gains, own, p, S, 0, COLUMNS)
        alive = met(number, 0, control, layer, alive, p, S)
        stream = qkv_proj(stream, operands, layer, None, p, S, COLUMNS)
        alive = met(number, 1, control, layer, alive, p, S)
        for column in range(count):
            # Splits that are not in use are other blocks' in every column.
            apart = (p.group_index + column * APART) % S.group
            at, slot = nth(pos, column), nth(slots, column)
            constants = ask_constants(layer, at, p, S)
            here = at_column(p, column, apart, S)
            alive = walk_splits(constants, layer, 0, at, slot, None, alive, here, S)
        alive = met(number, 2, control, layer, alive, p, S)
        for column in range(count):
            apart = (p.group_index + column * APART) % S.group
            at = nth(pos, column)
            window = tl.load(p.windows + layer)
            here = at_column(p, column, apart, S)
            alive = join_heads(window, layer, at, None, alive, here, S)
        alive = met(number, 3, control, layer, alive, p, S)
        stream, alive = shared_module(stream, count, number, layer, alive, p, S, 1, COLUMNS)
        gains = load_gains(2 * layer + 1, p, S)
        alive = met(number, 4, control, layer, alive, p, S)
        x, alive = join(x, 0, layer, 0, None, alive, mine, S, 1)
        store_operands(x, gains, own, p, S, 2, COLUMNS)
        alive = met(number, 5, control, layer, alive, p, S)
        stream = gate_up_proj(stream, operands, layer, None, p, S, COLUMNS)
        alive = met(number, 6, control, layer, alive, p, S)
        stream, alive = shared_module(stream, count, number, layer, alive, p, S, 3, COLUMNS)
        gains = load_gains(2 * layer + 2, p, S)
        alive = met(number, 7, control, layer, alive, p, S)
        x, alive = join(x, 0, layer, 0, None, alive, mine, S, 3)
        number += meetings(S, LAYER_PARTS)
        fetched = stream[2]
        base = base + S.layer_words
    store_operands(x, gains, own, p, S, 4, COLUMNS)
    heard, alive = gather(number, control, S.num_layers, alive, p, S)
    return number + 1, heard, fetched, alive


@triton.jit
def shared_kernel(p, S: tl.constexpr, COLUMNS: tl.constexpr, RULES: tl.constexpr):
    """Serve the slots that `p.slot_order` lists, at most COLUMNS, a token each a step, until one of them has ended."""
    tl.static_assert(S.lanes == 1, "lanes share no step")
    p = given(p, S)
    zero = p.block * 0  # a tensor also in the interpreter
    alive, stays, number, steps = zero + 1, zero + 1, zero, zero
    layers = p.weights + tl.zeros((), tl.int64)
    head = layers + S.num_layers * S.layer_words
    count = tl.load(p.slot_order)
    i = tl.arange(0, COLUMNS)
    slots = tl.load(p.slot_order + 1 + tl.minimum(i, count - 1))
    states, requests = state_of(slots, p, S), request_of(slots, p, S)
    prompts = tl.load(requests + field("prompt"))
    fetched = first_tiles(layers, p, S, 0)
    while (stays != 0) & (alive != 0):
        pos, tokens = tl.load(states + POSITION), tl.load(states + TOKEN)
        scores = tl.max((pos + 1 >= prompts).to(tl.int32), axis=0)
        control = ask_host(p, S)
        stream = (layers, either(scores != 0, head, layers), fetched)
        number, control, fetched, alive = run_shared_layers(
            (slots, pos, tokens), count, number, control, stream, alive, p, S, COLUMNS
        )
        if scores != 0:
            first, _, vocab_first = head_rows(p, S)
            out = (first, vocab_first, 0)
            stream = of_head((head, layers, fetched), p, S)
            xs = p.words + S.region("x")
            stream = rowwise(stream, xs, p.logits, out, p, S, 4, store_logits, COLUMNS)
            fetched = stream[2]
        for column in range(count):
            epoch = steps * COLUMNS + column + 1
            slot = tl.load(p.slot_order + 1 + column)
            here = at_column(p, column, p.group_index, S)
            best, best_id = no_candidate(p)
            scored = nth(pos, column) + 1 >= nth(prompts, column)
            if scored:
                best, best_id, alive = choose(nth(pos, column) + 1, epoch, slot, alive, here, S, RULES)
            token, _, alive = argmax(best, best_id, zero, epoch, alive, p, S)
            if RULES:
                if scored:
                    alive = keep(token, epoch, slot, alive, here, S)
            outcome = advance(token, alive, slot, p, S)
            stays = tl.where((outcome != 0) | (token == EXPIRED_ID), 0, stays)
        steps += 1
        beat(tl.where(alive == 0, steps - 1, steps), p, S)
        stays = tl.where(control == YIELD, 0, stays)
        meet(S)  # the block's own outcomes, which other threads wrote
    if alive == 0:
        diagnose_timeout(p, S)
