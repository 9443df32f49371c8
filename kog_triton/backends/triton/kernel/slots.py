"""What slots keep: requests and their progress, in device memory, and the mailbox in memory that the host sees.

A request is the words of backends/request_words.py. Progress is one small record a slot and block; all blocks
hold the same values, each reads only what it wrote, so a switch of slots costs no exchange, and a launch goes
on where the last one left.

    mailbox, int64 a slot    0  of slot 0, the host's: YIELD has the launch leave at the next token boundary
                             2  of slot 0: see `beat`
                             8 ..  tokens (token_words.py), stamps, mask, logprob records: mailbox_offsets
"""

from typing import Any

import triton
import triton.language as tl

from kog_triton.backends.logprob_words import RECORD_WORDS
from kog_triton.backends.request_words import OFFSETS, Flag, capacity
from kog_triton.backends.token_words import OUTCOME_SHIFT, Outcome
from kog_triton.backends.triton.kernel.sync import clock, load_shared, stamps_tokens, store_shared

STOP: tl.constexpr = tl.constexpr(int(Outcome.STOP))
LENGTH: tl.constexpr = tl.constexpr(int(Outcome.LENGTH))
YIELD: tl.constexpr = tl.constexpr(int(Outcome.YIELD))
EXPIRED: tl.constexpr = tl.constexpr(int(Outcome.FAILED))
VOID: tl.constexpr = tl.constexpr(int(Outcome.NOT_FINITE))
NONE_ALLOWED: tl.constexpr = tl.constexpr(int(Outcome.NOTHING_ALLOWED))
SHIFT: tl.constexpr = tl.constexpr(OUTCOME_SHIFT)
# ids that are none: why there is no token
NO_LOGITS: tl.constexpr = tl.constexpr(0x7FFFFFFF)
VOID_ID: tl.constexpr = tl.constexpr(-1)
NONE_ALLOWED_ID: tl.constexpr = tl.constexpr(-2)
EXPIRED_ID: tl.constexpr = tl.constexpr(-3)
# words of a state
POSITION: tl.constexpr = tl.constexpr(0)  # of the token to run next
TOKEN: tl.constexpr = tl.constexpr(1)  # that token
MADE: tl.constexpr = tl.constexpr(2)
OUTCOME: tl.constexpr = tl.constexpr(3)  # 0 while the request runs
STATE_WORDS: tl.constexpr = tl.constexpr(8)

ALL_LOGITS: tl.constexpr = tl.constexpr(int(Flag.ALL_LOGITS))
EDITED: tl.constexpr = tl.constexpr(int(Flag.EDITED))

STOPS: tl.constexpr = tl.constexpr(32)  # stop ids compared at once
HOST, BEAT, TOKENS = 0, 2, 8  # words of a slot's mailbox; the first two in that of slot 0


@triton.constexpr_function
def mailbox_offsets(tiles: Any) -> dict[str, int]:
    """Where the parts of a slot's mailbox begin, and how long it is ("end"), in int64 words."""
    stamps = TOKENS + tiles.max_context
    mask = stamps + tiles.max_context
    records = mask + -(-tiles.vocab_size // 32)
    end = records + tiles.max_context * RECORD_WORDS
    parts = {"host": HOST, "beat": BEAT, "tokens": TOKENS, "stamps": stamps, "mask": mask}
    return parts | {"records": records, "end": end}


@triton.constexpr_function
def mailbox_at(S, name):
    return mailbox_offsets(S)[name]


@triton.constexpr_function
def field(name):
    return OFFSETS[name]


request_words = triton.constexpr_function(capacity)


@triton.jit
def request_of(slot, p, S: tl.constexpr):
    WORDS: tl.constexpr = request_words(S.vocab_size)
    return p.requests + slot * WORDS


@triton.jit
def state_of(slot, p, S: tl.constexpr):
    return p.states + (slot * S.num_blocks + p.block) * STATE_WORDS


@triton.jit
def mail_of(slot, p, name: tl.constexpr, S: tl.constexpr):
    """The slot's mailbox from one of its parts on."""
    WORDS: tl.constexpr = mailbox_at(S, "end")
    AT: tl.constexpr = mailbox_at(S, name)
    return p.mailbox + slot.to(tl.int64) * WORDS + AT


@triton.jit
def ask_host(p, S: tl.constexpr):
    """The host's word, in block 0; the others hear of it with the candidates, so all act at one token."""
    control = p.block * 0
    if p.block == 0:
        control = load_shared(mail_of(control, p, "host", S), S).to(tl.int32)
    return control


@triton.jit
def beat(count, p, S: tl.constexpr):
    """The heartbeat, to the host: passes that the launch has ended; below zero, steps of prompts in chunks."""
    if p.block == 0:
        store_shared(mail_of(p.block * 0, p, "beat", S), count.to(tl.int64))


@triton.jit
def is_stop(token, request):
    """Whether the token is among the request's stop ids."""
    ids = request + tl.load(request + field("stop_ids"))
    count = tl.load(request + field("stop_ids") + 1)
    hit = token * 0
    for first in range(0, count, STOPS):
        i = first + tl.arange(0, STOPS)
        stop = tl.load(ids + i, mask=i < count, other=-1)
        hit = tl.maximum(hit, tl.max((stop == token).to(tl.int32), axis=0))
    return hit


@triton.jit
def advance(token, alive, slot, p, S: tl.constexpr):
    """Write down a pass of the slot that chose `token`, if its position chooses one: the request's outcome."""
    request, own = request_of(slot, p, S), state_of(slot, p, S)
    position = tl.load(own + POSITION) + 1
    made = tl.load(own + MADE)
    flags = tl.load(request + field("flags"))
    keeps = (flags & ALL_LOGITS) != 0
    chooses = (position >= tl.load(request + field("prompt"))) & (keeps == 0)
    outcome = token * 0
    if chooses | keeps:
        made += 1
        outcome = tl.where(made >= tl.load(request + field("most")), LENGTH, outcome)
    known = p.tokens + slot * (S.max_context + 1)
    if chooses:
        if is_stop(token, request) != 0:
            outcome = token * 0 + STOP
        outcome = tl.where(token == VOID_ID, VOID, outcome)
        outcome = tl.where(token == NONE_ALLOWED_ID, NONE_ALLOWED, outcome)
        if p.block == 0:
            high = ((outcome << SHIFT) | made).to(tl.int64)
            word = (high << 32) | (token.to(tl.int64) & 0xFFFFFFFF)
            if (token != EXPIRED_ID) & (alive != 0):
                if stamps_tokens(S):
                    store_shared(mail_of(slot, p, "stamps", S) + made - 1, clock(S))
                store_shared(mail_of(slot, p, "tokens", S) + made - 1, word)
        if (flags & EDITED) != 0:
            tl.store(known + position, token)  # for bad words; every block writes what it reads
        next_token = token
    else:
        next_token = tl.load(known + position)
    outcome = tl.where((alive == 0) | (token == EXPIRED_ID), EXPIRED, outcome)
    tl.debug_barrier()  # one thread writes what every warp has read above
    tl.store(own + POSITION, position)
    tl.store(own + TOKEN, next_token)
    tl.store(own + MADE, made)
    tl.store(own + OUTCOME, outcome)
    return outcome


@triton.jit
def next_slot(entry, count, p, S: tl.constexpr):
    """The next entry of `slot_order`, round robin, whose slot still runs; -1 if there is none."""
    found = entry * 0 - 1
    steps = entry * 0
    while (steps < count) & (found < 0):
        entry = tl.where(entry + 1 < count, entry + 1, 0)
        slot = tl.load(p.slot_order + 1 + entry)
        running = tl.load(state_of(slot, p, S) + OUTCOME) == 0
        found = tl.where(running, entry, -1)
        steps += 1
    return found
