"""The megakernel: one launch serves slots, a token each in turn, until all have stopped or the host wants it to leave.

A pass runs one token of one slot: its embedding, the layers, and where a token is to be chosen the head. Every pass
ends in one meeting of all blocks (sample.winner), at which they agree on the token and on what the host wants. All
that a later launch needs is in device memory by then (slots.py). With CHUNKS, prompts run first, many tokens a pass.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.chunk import run_prompts, run_prompts_apart
from kog_triton.backends.triton.kernel.head import choose, keep, logits_row, no_candidate, score
from kog_triton.backends.triton.kernel.layer import run_layer
from kog_triton.backends.triton.kernel.matvec import fill
from kog_triton.backends.triton.kernel.residual import load_embedding, load_gains
from kog_triton.backends.triton.kernel.sample import publish_candidate, winner
from kog_triton.backends.triton.kernel.slots import (
    ALL_LOGITS,
    EXPIRED,
    EXPIRED_ID,
    POSITION,
    TOKEN,
    YIELD,
    advance,
    ask_host,
    beat,
    field,
    next_turn,
    request_of,
    state_of,
)
from kog_triton.backends.triton.kernel.sync import calls_cheaply, fence, meet
from kog_triton.backends.triton.kernel.words import investigate


@triton.jit
def run_layers(
    pos, token, slot, it, block, lane, place, next_base, ring, alive, p, S: tl.constexpr
):
    """A token through all layers: x and the gains of the last norm, the ring full of what is at `next_base`, alive."""
    Q: tl.constexpr = S.stages[0]
    gains = load_gains(0, lane, p, S)
    x = load_embedding(token, p, S, Q.chunks, Q.tile_words)
    base = p.weights + tl.zeros((), tl.int64)
    for layer in tl.range(S.num_layers, disable_licm=True):
        following = (base + S.layer_words).to(tl.int64)
        last = layer == S.num_layers - 1
        after = tl.where(last, next_base.to(tl.int64), following).to(base.dtype)
        x, gains, ring, alive = run_layer(
            layer,
            it + layer,
            pos,
            slot,
            block,
            lane,
            place,
            base,
            after,
            x,
            gains,
            ring,
            alive,
            p,
            S,
        )
        base = base + S.layer_words
    return x, gains, ring, alive


@triton.jit
def decode_kernel(p, S: tl.constexpr, RULES: tl.constexpr, CHUNKS: tl.constexpr):
    """Serve the slots that `p.turns` lists.

    Without RULES no request among them asks for any but a temperature, without CHUNKS every prompt runs token by token.
    """
    block = tl.program_id(0)
    lane, place = block // S.group, block % S.group
    zero = block * 0  # a tensor also in the interpreter
    alive, heads, passes, turn = zero + 1, zero, zero, zero
    slots = tl.load(p.turns)
    layers = p.weights + tl.zeros((), tl.int64)
    head = layers + S.num_layers * S.layer_words
    if CHUNKS:
        if calls_cheaply(S):
            alive, stays = run_prompts_apart(alive, block, lane, place, p, S)
        else:
            alive, stays = run_prompts(alive, block, lane, place, p, S)
        turn = tl.where(stays != 0, next_turn(slots - 1, slots, block, p, S), -1)
    ring = fill(layers, block, S, 0)
    while turn >= 0:
        # Pairs with the fence before the last publication of a token: its cache rows are there.
        fence(p.fences + block * 32, S)
        slot = tl.load(p.turns + 1 + turn)
        own, request = state_of(slot, block, p, S), request_of(slot, p, S)
        pos, token = tl.load(own + POSITION), tl.load(own + TOKEN)
        chooses = pos + 1 >= tl.load(request + field("prompt"))
        scores = chooses | ((tl.load(request + field("flags")) & ALL_LOGITS) != 0)
        after = tl.where(scores, head.to(tl.int64), layers.to(tl.int64)).to(layers.dtype)
        x, gains, ring, alive = run_layers(
            pos, token, slot, passes * S.num_layers, block, lane, place, after, ring, alive, p, S
        )
        passes += 1
        control = ask_host(block, p, S)
        best, best_id = no_candidate(block)
        if scores:
            heads += 1
            row = logits_row(slot, pos, p, S)
            ring, alive = score(
                x, gains, row, heads, block, lane, place, head, layers, ring, alive, p, S
            )
            if (tl.load(request + field("flags")) & ALL_LOGITS) == 0:
                best, best_id, alive = choose(
                    pos + 1, passes, slot, block, lane, place, alive, p, S, RULES
                )
        publish_candidate(best, best_id, control, passes, alive, block, p, S)
        token, control, alive = winner(passes, alive, p, S)
        if RULES:
            if scores:
                keep(token, slot, block, lane, place, p, S)
        outcome = advance(token, alive, slot, block, p, S)
        beat(tl.where(outcome == EXPIRED, passes - 1, passes), block, p, S)
        if (slots > 1) | (outcome != 0):
            meet(S)  # the block's own outcomes, which other threads wrote
            turn = next_turn(turn, slots, block, p, S)
        left = (control == YIELD) | (alive == 0) | (token == EXPIRED_ID)
        turn = tl.where(left, -1, turn)
    if alive == 0:
        investigate(p, S)
