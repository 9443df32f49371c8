"""From the residual stream to a candidate: mix the lanes, score the block's rows of the vocabulary, choose the best.

one lane          norm x                     > lm_head
MEAN, SUM         norm or add x of all lanes > lm_head       two small hops: rows of each lane, then sums of rows
VOCAB_PARALLEL    norm the lane's own x      > its own rows
CONCAT            norm x of each lane        > lm_head lane by lane: a matrix of the whole width would need all
                                               lanes' streams in registers at once
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kog_triton.backends.request_words import Flag
from kog_triton.backends.triton.kernel.all_reduce import (
    ROUNDS,
    SURVIVES,
    all_gather,
    best_candidate,
    check_argmax,
    four,
    ordered,
    pick,
    survivors,
    unordered,
)
from kog_triton.backends.triton.kernel.edits import edited, remember
from kog_triton.backends.triton.kernel.logprobs import deliver, deliver_own
from kog_triton.backends.triton.kernel.matvec import first_tiles, rowwise
from kog_triton.backends.triton.kernel.residual import add_planes, rms_norm, rounded
from kog_triton.backends.triton.kernel.sample import best_of, keys_of
from kog_triton.backends.triton.kernel.slots import EDITED, NO_LOGITS, field, request_of
from kog_triton.backends.triton.kernel.sync import meet, store_shared
from kog_triton.backends.triton.kernel.words import (
    in_columns,
    pack_f32,
    plane_index,
    plane_tiles,
    poll,
    record_more,
    record_timeout,
    settle,
    unpack_f32,
    wait_planes,
)
from kog_triton.model.spec import Head

MEAN: tl.constexpr = tl.constexpr(int(Head.MEAN))
SUM_THEN_NORM: tl.constexpr = tl.constexpr(int(Head.SUM_THEN_NORM))
VOCAB_PARALLEL: tl.constexpr = tl.constexpr(int(Head.VOCAB_PARALLEL))
CONCAT: tl.constexpr = tl.constexpr(int(Head.CONCAT))
CUT: tl.constexpr = tl.constexpr(int(Flag.CUT))
LOGPROBS: tl.constexpr = tl.constexpr(int(Flag.LOGPROBS))
ALL_REDUCED: tl.constexpr = tl.constexpr(int(Flag.CUT | Flag.LOGPROBS))


# ---- lm_head ----


@triton.jit
def store_logits(y, to, unit, out, S: tl.constexpr, COLUMNS: tl.constexpr):
    """`before` is 1 where the rows already hold the other lanes' share (CONCAT)."""
    T: tl.constexpr = S.stages[4]
    first, vocab_first, before = out
    i, column = in_columns(T.tile_rows, COLUMNS)
    r = first + unit * T.tile_rows + i
    if S.head_mode == CONCAT:
        y += tl.load(to + vocab_first + r, mask=(r < T.rows) & (before != 0), other=0.0)
    tl.store(to + column * S.vocab_size + vocab_first + r, y, mask=r < T.rows)


@triton.jit
def send_part(x, gains, phase, p, S: tl.constexpr):
    """The block sends its rows of its lane's stream, normed unless the lanes are added first."""
    HALF: tl.constexpr = S.hidden_size // 2
    if S.head_mode != SUM_THEN_NORM:
        x = rms_norm(x, gains, S)
    part = p.words + S.region("part") + p.lane * S.hidden_size
    for c in tl.static_range(plane_tiles(S)):
        j = plane_index(c, S)
        mine = (j < HALF) & (j * S.group // HALF == p.group_index)
        for plane in tl.static_range(2):
            store_shared(part + plane * HALF + j, pack_f32(x[2 * c + plane], phase), mine)


@triton.jit
def mix_lanes(x, gains, phase, alive, p, S: tl.constexpr):
    """The head's input from all lanes, and alive."""
    SHARE: tl.constexpr = (S.hidden_size + S.num_blocks - 1) // S.num_blocks
    ROWS: tl.constexpr = triton.next_power_of_2(SHARE)
    LANES: tl.constexpr = triton.next_power_of_2(S.lanes)
    send_part(x, gains, phase, p, S)
    # Every block adds its rows over the lanes, in one wait for all of them.
    part = p.words + S.region("part")
    first = p.block * SHARE
    count = tl.minimum(SHARE, S.hidden_size - first)
    i = tl.arange(0, ROWS)
    r, valid = first + i, i < count
    j = tl.arange(0, LANES)[:, None]
    have = (j < S.lanes) & valid[None, :]
    ptr = part + j * S.hidden_size + r[None, :]
    ws, bad = poll((ptr,), (have,), phase, alive, p, S)
    if (bad != 0) & (alive != 0):
        record_timeout(part, 0, phase, "mix part", 0, p)
        record_more(part + first, count, S.hidden_size, S.lanes, p)
    alive = tl.where(bad != 0, 0, alive)
    total = tl.sum(tl.where(have, unpack_f32(settle(ws[0])), 0.0), axis=0)
    if S.head_mode == MEAN:
        total = total / S.lanes
    store_shared(p.words + S.region("y") + r, pack_f32(total, phase), valid)
    w, alive = wait_planes(p.words + S.region("y"), phase, alive, "mix y", 0, p, S)
    y = add_planes([plane * 0.0 for plane in x], w, S)
    if S.head_mode == SUM_THEN_NORM:
        y = rms_norm(y, gains, S)
    return y, alive


@triton.jit
def score_lanes(x, logits, first, stream, phase, alive, p, S: tl.constexpr):
    """Logits of the block's rows of a head as wide as all lanes, whose x are in words: the weight stream, alive."""
    head, behind, fetched = stream
    for j in range(S.lanes):
        part = p.words + S.region("part") + j * S.hidden_size
        w, alive = wait_planes(part, phase, alive, "lm_head part", 0, p, S)
        xs = rounded(add_planes([plane * 0.0 for plane in x], w, S), S, 4)
        base = head + j * S.head_words
        following = (base + S.head_words).to(tl.int64)
        next_base = tl.where(j == S.lanes - 1, behind.to(tl.int64), following).to(base.dtype)
        own = (base, next_base, fetched)
        _, _, fetched = rowwise(own, xs, logits, (first, 0, j), p, S, 4, store_logits, 1)
        meet(S)  # the next lane's share is added to what other threads stored
    return (head, behind, fetched), alive


@triton.jit
def of_head(stream, p, S: tl.constexpr):
    """The stream as lm_head begins: what was asked for as if for qkv_proj is the head's where their tiles are alike."""
    if S.head_alike:
        return stream
    else:
        return stream[0], stream[1], first_tiles(stream[0], p, S, 4)


@triton.jit
def score(x, gains, row, epoch, stream, alive, p, S: tl.constexpr):
    """Logits of the block's rows into row `row` of p.logits; `epoch` counts heads. The weight stream and alive."""
    phase = epoch & 1
    first, _, vocab_first = head_rows(p, S)
    logits = p.logits + row.to(tl.int64) * S.vocab_size
    if S.lanes > 1 and S.head_mode == CONCAT:
        send_part(x, gains, phase, p, S)
        stream, alive = score_lanes(x, logits, first, stream, phase, alive, p, S)
    else:
        stream = of_head(stream, p, S)
        if S.lanes > 1 and S.head_mode != VOCAB_PARALLEL:
            y, alive = mix_lanes(x, gains, phase, alive, p, S)
        else:
            y = rms_norm(x, gains, S)
        out = (first, vocab_first, 0)
        stream = rowwise(stream, rounded(y, S, 4), logits, out, p, S, 4, store_logits, 1)
    return stream, alive


@triton.jit
def head_rows(p, S: tl.constexpr):
    """The block's rows of its group's matrix: the first one, their number, and the first id of the matrix."""
    T: tl.constexpr = S.stages[4]
    if S.lanes > 1 and S.head_mode == VOCAB_PARALLEL:
        first, vocab_first = p.group_index * T.block_rows, p.lane * T.rows
    else:
        first, vocab_first = p.block * T.block_rows, p.block * 0
    return first, tl.maximum(tl.minimum(T.block_rows, T.rows - first), 0), vocab_first


# ---- the choice ----


@triton.constexpr_function
def choice_rows(S):
    """Length of a block's vectors of ids: its rows of the vocabulary, padded."""
    rows = triton.next_power_of_2(S.stages[4].block_rows)
    return 2 * rows if rows == S.sizes.unlowered else rows


class Ids(NamedTuple):
    """Ids of the vocabulary that a block scores, padded."""

    ids: Any  # int32 [rows]
    mine: Any  # which of them there are
    first: Any
    count: Any


@triton.jit
def own_ids(p, S: tl.constexpr):
    """The block's ids."""
    first, count, vocab_first = head_rows(p, S)
    first += vocab_first
    i = tl.arange(0, choice_rows(S))
    return Ids(first + i, i < count, first, count)


@triton.jit
def choose(position, epoch, slot, alive, p, S: tl.constexpr, RULES: tl.constexpr):
    """The block's best key for the token at `position`, its id, and alive; `epoch` counts choices."""
    request = request_of(slot, p, S)
    meet(S)  # the block's own logits are read again by other threads
    own = own_ids(p, S)
    logit = tl.load(p.logits + own.ids, mask=own.mine, other=-float("inf"))
    void = ((logit != logit) | (logit == float("inf"))) & own.mine
    left = own.mine
    if RULES:
        key, left, alive = by_the_rules(logit, own, position, epoch, slot, alive, p, S)
    else:
        key = keys_of(logit, own.ids, position, request)
    best, best_id = best_of(key, left, own.ids, void)
    return best, best_id, alive


@triton.jit
def by_the_rules(raw, own, position, epoch, slot, alive, p, S: tl.constexpr):
    """What the ids compete with once edited, which of them the cuts let compete, and alive; log-probabilities on
    the way. Where it is known who wins by then, that one alone is left."""
    request = request_of(slot, p, S)
    flags = tl.load(request + field("flags"))
    logit, left = raw, own.mine
    if (flags & EDITED) != 0:
        logit, alive = edited(logit, own, position, slot, alive, p, S)
        left = own.mine & (logit > -float("inf"))
    key = keys_of(logit, own.ids, position, request)
    if (flags & ALL_REDUCED) != 0:
        round = epoch * ROUNDS
        bits, who = best_candidate(key, logit, left, own.ids)
        best = four(ordered(tl.max(logit, axis=0)), ordered(tl.max(raw, axis=0)), bits, who)
        gathered, alive = all_gather(best, round, alive, p, S, "all_reduce")
        round += 1
        if (flags & CUT) != 0:
            top = unordered(tl.max(pick(gathered, 0), axis=0))
            checked, result, round, alive = check_argmax(
                gathered, key, logit, left, own.ids, top, flags, request, round, alive, p, S
            )
            if result == SURVIVES:
                left = left & (own.ids == checked)
            else:
                left, round, alive = survivors(logit, left, top, flags, request, round, alive, p, S)
        if (flags & LOGPROBS) != 0:
            top = unordered(tl.max(pick(gathered, 1), axis=0))
            alive = deliver(raw, own, top, request, round, slot, alive, p, S)
    return key, left, alive


@triton.jit
def keep(token, epoch, slot, alive, p, S: tl.constexpr):
    """What is written down of the chosen token, and alive; `epoch` counts passes."""
    flags = tl.load(request_of(slot, p, S) + field("flags"))
    if (flags & (EDITED | LOGPROBS)) != 0:
        own = own_ids(p, S)
        if (flags & EDITED) != 0:
            remember(token, own, slot, p, S)
        if ((flags & LOGPROBS) != 0) & (token >= 0):
            logit = tl.load(p.logits + own.ids, mask=own.mine, other=-float("inf"))
            alive = deliver_own(token, logit, own, epoch, slot, alive, p, S)
    return alive


@triton.jit
def no_candidate(p):
    """What a pass without a choice publishes."""
    return (p.block * 0).to(tl.float64) - float("inf"), p.block * 0 + NO_LOGITS
