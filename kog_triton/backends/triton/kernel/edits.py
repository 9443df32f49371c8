"""Edited logits: penalties, bias, bans and the host's mask, in the order and bits of sampling/definition.py's `adjust`.

A block edits the rows of the head that it owns. What an edit needs to know of earlier tokens stands in three tables, of
which a block reads and writes its own rows alone:

    marks   how often an id is in the output, and two bits: SEEN in the prompt, END of the sequence
    bias    what is added; -inf where the request allows other ids only
    bans    the number of the last token for which a bad word banned the id
"""

import triton
import triton.language as tl

from kog_triton.backends.request_words import Flag
from kog_triton.backends.triton.kernel.slots import MADE, field, mail_of, request_of, state_of
from kog_triton.backends.triton.kernel.sync import meet
from kog_triton.backends.triton.kernel.words import POLLED, wait_tagged

PENALIZED: tl.constexpr = tl.constexpr(int(Flag.PENALIZED))
BIASED: tl.constexpr = tl.constexpr(int(Flag.BIASED))
ALLOWED: tl.constexpr = tl.constexpr(int(Flag.ALLOWED))
MASKED: tl.constexpr = tl.constexpr(int(Flag.MASKED))
MIN_TOKENS: tl.constexpr = tl.constexpr(int(Flag.MIN_TOKENS))
SEEN: tl.constexpr = tl.constexpr(1 << 30)
END: tl.constexpr = tl.constexpr(1 << 29)
COUNT: tl.constexpr = tl.constexpr((1 << 29) - 1)
BAD_WORDS: tl.constexpr = tl.constexpr(32)  # compared at once


@triton.jit
def real(request, name: tl.constexpr):
    """A float32 field of the request."""
    return tl.load(request + field(name)).to(tl.float32, bitcast=True)


@triton.jit
def edited(logit, own, position, slot, alive, p, S: tl.constexpr):
    """The logits [rows] of the block's ids (head.Ids) as the request wants them, -inf where it bans; and alive."""
    request = request_of(slot, p, S)
    flags = tl.load(request + field("flags"))
    number = tl.load(state_of(slot, p, S) + MADE) + 1
    row = slot.to(tl.int64) * S.vocab_size + own.ids
    marks = tl.load(p.marks + row, mask=own.mine, other=0)
    if (flags & PENALIZED) != 0:
        logit = penalized(logit, marks, request)
    if (flags & (BIASED | ALLOWED)) != 0:
        bias = tl.load(p.bias + row, mask=own.mine, other=0.0)
        logit = tl.where(bias != 0.0, logit + bias, logit)
    if (flags & MIN_TOKENS) != 0:
        early = number <= tl.load(request + field("min_tokens"))
        logit = tl.where(((marks & END) != 0) & early, -float("inf"), logit)
    if tl.load(request + field("bad_ends") + 1) != 0:
        ban_bad_words(own, position, number, slot, request, p, S)
        banned = tl.load(p.bans + row, mask=own.mine, other=0) == number
        logit = tl.where(banned, -float("inf"), logit)
    if (flags & MASKED) != 0:
        bits, alive = wait_mask(own, number, slot, alive, p, S)
        logit = tl.where(((bits >> (own.ids & 31)) & 1) == 0, -float("inf"), logit)
    return logit, alive


@triton.jit
def penalized(logit, marks, request):
    """Every step alone, in float64, and rounded once."""
    count = marks & COUNT
    seen = (marks & (SEEN | COUNT)) != 0
    wide = logit.to(tl.float64)
    factor = real(request, "repetition").to(tl.float64)
    repeated = tl.where(wide > 0.0, wide / factor, wide * factor).to(tl.float32)
    logit = tl.where(seen, repeated, logit)
    step = real(request, "frequency").to(tl.float64)
    logit = (logit.to(tl.float64) - step * count.to(tl.float64)).to(tl.float32)
    return tl.where(count > 0, logit - real(request, "presence"), logit)


@triton.jit
def ban_bad_words(own, position, number, slot, request, p, S: tl.constexpr):
    """Mark, of the block's ids, those that would complete a bad word at `position`."""
    known = p.tokens + slot * (S.max_context + 1)
    ends = request + tl.load(request + field("bad_ends"))
    words = tl.load(request + field("bad_ends") + 1)
    ids = request + tl.load(request + field("bad_ids"))
    for at in range(0, words, BAD_WORDS):
        i = at + tl.arange(0, BAD_WORDS)
        end = tl.load(ends + i, mask=i < words, other=0)
        begin = tl.load(ends + i - 1, mask=(i < words) & (i > 0), other=0)
        before = end - begin - 1  # ids of the word that the output must end with
        match = (i < words) & (before < number)
        longest = tl.max(before, axis=0)
        for j in range(1, longest + 1):
            asked = match & (j <= before)
            word = tl.load(ids + end - 1 - j, mask=asked, other=0)
            token = tl.load(known + tl.maximum(position - j, 0))
            match = match & ((word == token) | (j > before))
        last = tl.load(ids + end - 1, mask=match, other=-1)
        scored = match & (last >= own.first) & (last < own.first + own.count)
        tl.store(p.bans + slot.to(tl.int64) * S.vocab_size + last, last * 0 + number, mask=scored)
    meet(S)  # other threads of the block read them


@triton.jit
def wait_mask(own, number, slot, alive, p, S: tl.constexpr):
    """The host's mask word of each id once it is that of token `number`: int32; and alive."""
    COPIES: tl.constexpr = max(1, POLLED // own.ids.numel)
    copy = tl.arange(0, COPIES)[:, None]
    ptr = mail_of(slot, p, "mask", S) + (own.ids >> 5)[None, :] + copy * 0
    asked = own.mine[None, :] & (copy >= 0)
    w, alive = wait_tagged(ptr, asked, number, alive, "sample mask", p, S)
    return tl.max(w, axis=0).to(tl.int32), alive


@triton.jit
def remember(token, own, slot, p, S: tl.constexpr):
    """Count a chosen token, in the block that owns its row."""
    if (token >= own.first) & (token < own.first + own.count):
        mark = p.marks + slot.to(tl.int64) * S.vocab_size + token
        tl.store(mark, tl.load(mark) + 1)
