"""The megakernel: one launch serves slots, a token each, until all have stopped or the host asks it to leave.

A pass runs one token of one slot: its embedding, the layers, and where a token is to be chosen the head. Every pass
ends in one meeting of all blocks (sample.argmax), at which they agree on the token and on what the host wants. All
that a later launch needs is in device memory by then (slots.py). With CHUNKS, prompts run first, many tokens a pass.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.chunk import run_prompts, run_prompts_apart
from kog_triton.backends.triton.kernel.embedding import load_embedding
from kog_triton.backends.triton.kernel.head import choose, keep, no_candidate, score
from kog_triton.backends.triton.kernel.layer import run_layer
from kog_triton.backends.triton.kernel.matvec import either, first_tiles
from kog_triton.backends.triton.kernel.pointers import given
from kog_triton.backends.triton.kernel.residual import load_gains
from kog_triton.backends.triton.kernel.sample import argmax
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
    next_slot,
    request_of,
    state_of,
)
from kog_triton.backends.triton.kernel.sync import calls_cheaply, fence, meet, uniform
from kog_triton.backends.triton.kernel.words import diagnose_timeout


@triton.jit
def run_layers(pos, token, slot, it, stream, alive, p, S: tl.constexpr):
    """A token through all layers: x and the gains of the last norm, the tiles fetched behind them, alive."""
    base, behind, fetched = stream
    gains = load_gains(0, p, S)
    x = load_embedding(token, p, S)
    for layer in tl.range(S.num_layers, disable_licm=True):
        next_base = either(layer == S.num_layers - 1, behind, base + S.layer_words)
        own = (base, next_base, fetched)
        x, gains, own, alive = run_layer(layer, it + layer, pos, slot, own, x, gains, alive, p, S)
        fetched = own[2]
        base = base + S.layer_words
    return x, gains, fetched, alive


@triton.jit
def decode_kernel(p, S: tl.constexpr, RULES: tl.constexpr, CHUNKS: tl.constexpr):
    """Serve the slots that `p.slot_order` lists.

    Without RULES no request among them asks for any but a temperature, without CHUNKS every prompt runs token by token.
    """
    p = given(p, S)
    zero = p.block * 0  # a tensor also in the interpreter
    alive, heads, passes, entry = zero + 1, zero, zero, zero
    slots = tl.load(p.slot_order)
    layers = p.weights + tl.zeros((), tl.int64)
    head = layers + S.num_layers * S.layer_words
    if CHUNKS:
        if calls_cheaply(S):
            alive, stays = run_prompts_apart(alive, p, S)
        else:
            alive, stays = run_prompts(alive, p, S)
        entry = tl.where(stays != 0, next_slot(slots - 1, slots, p, S), -1)
    fetched = first_tiles(layers, p, S, 0)
    while entry >= 0:
        # Pairs with the fence before the last publication of a token: its cache rows are there.
        fence(p.fences + p.block * 32, S)
        slot = tl.load(p.slot_order + 1 + entry)
        own, request = state_of(slot, p, S), request_of(slot, p, S)
        pos, token = tl.load(own + POSITION), tl.load(own + TOKEN)
        chooses = pos + 1 >= tl.load(request + field("prompt"))
        scores = chooses | ((tl.load(request + field("flags")) & ALL_LOGITS) != 0)
        behind = either(uniform(scores.to(tl.int32), S) != 0, head, layers)
        stream = (layers, behind, fetched)
        x, gains, fetched, alive = run_layers(pos, token, slot, passes * S.num_layers, stream, alive, p, S)
        passes += 1
        control = ask_host(p, S)
        best, best_id = no_candidate(p)
        if scores:
            heads += 1
            keeps = (tl.load(request + field("flags")) & ALL_LOGITS) != 0
            row = tl.where(keeps, pos - tl.load(request + field("first")), 0)
            scoring = (head, layers, fetched)
            scoring, alive = score(x, gains, row, heads, scoring, alive, p, S)
            fetched = scoring[2]
            if (tl.load(request + field("flags")) & ALL_LOGITS) == 0:
                best, best_id, alive = choose(pos + 1, passes, slot, alive, p, S, RULES)
        token, control, alive = argmax(best, best_id, control, passes, alive, p, S)
        if RULES:
            if scores:
                alive = keep(token, passes, slot, alive, p, S)
        outcome = advance(token, alive, slot, p, S)
        beat(tl.where(outcome == EXPIRED, passes - 1, passes), p, S)
        if (slots > 1) | (outcome != 0):
            meet(S)  # the block's own outcomes, which other threads wrote
            entry = next_slot(entry, slots, p, S)
        left = (control == YIELD) | (alive == 0) | (token == EXPIRED_ID)
        entry = tl.where(left, -1, entry)
    if alive == 0:
        diagnose_timeout(p, S)
