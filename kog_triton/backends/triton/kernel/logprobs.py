"""Log-probabilities of a token, as backends/logprob_words.py wants them: raw logits and the logarithm of their sum."""

import math

import triton
import triton.language as tl

from kog_triton.backends.logprob_words import RECORD_WORDS, TOP
from kog_triton.backends.triton.kernel.all_reduce import all_gather, four, ordered, pick, unordered
from kog_triton.backends.triton.kernel.noise import bit_length_64, log2_of_length, weight
from kog_triton.backends.triton.kernel.slots import MADE, NO_LOGITS, field, mail_of, state_of
from kog_triton.backends.triton.kernel.sync import store_shared
from kog_triton.sampling.fixed import DISTANCE_BITS

LOG2E_SCALE: tl.constexpr = tl.constexpr(math.log2(math.e) * 2.0**DISTANCE_BITS)
FIRST: tl.constexpr = tl.constexpr(TOP)  # word of the first candidate
RECORD: tl.constexpr = tl.constexpr(RECORD_WORDS)


@triton.jit
def record_of(slot, p, S: tl.constexpr):
    """Where the record of the slot's next token begins, and the token's number."""
    made = tl.load(state_of(slot, p, S) + MADE)
    record = mail_of(slot, p, "records", S) + made.to(tl.int64) * RECORD
    return record, (made + 1).to(tl.int64) << 32


@triton.jit
def float_bits(x):
    return x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def deliver(logit, own, top, request, round, slot, alive, p, S: tl.constexpr):
    """All of the record but the token's own logit: block 0 writes it down; returns alive."""
    record, number = record_of(slot, p, S)
    distance = (top.to(tl.float64) - logit.to(tl.float64)) * LOG2E_SCALE
    share = tl.sum(tl.where(own.mine, weight(distance), 0), axis=0)
    gathered, alive = all_gather(four(share), round, alive, p, S, "all_reduce")
    if p.block == 0:
        total = tl.sum(pick(gathered, 0), axis=0).to(tl.uint64)
        length = bit_length_64(total)
        store_shared(record + 1, number | float_bits(top))
        store_shared(record + 2, number | (log2_of_length(total, length) & 0xFFFFFFFF))
    keys = tl.where(own.mine, ordered(logit), -1)
    for k in range(tl.load(request + field("logprobs"))):
        best = tl.max(keys, axis=0)
        best_id = tl.min(tl.where(keys == best, own.ids, NO_LOGITS), axis=0)
        # a block that has no candidates left gives zero
        sent = four(best + 1, best_id.to(tl.int64))
        gathered, alive = all_gather(sent, round + 1 + k, alive, p, S, "all_reduce")
        values = pick(gathered, 0)
        largest = tl.max(values, axis=0)
        chosen = tl.min(tl.where(values == largest, pick(gathered, 1), NO_LOGITS), axis=0)
        keys = tl.where(own.ids == chosen, -1, keys)
        if p.block == 0:
            to = record + FIRST + k
            store_shared(to, ((chosen + 1) << 32) | float_bits(unordered(largest - 1)))
    return alive


@triton.jit
def deliver_own(token, logit, own, epoch, slot, alive, p, S: tl.constexpr):
    """The chosen token's own logit, by the block that scored it, and its rank, of which every block counts its share,
    by block 0; returns alive."""
    record, number = record_of(slot, p, S)
    key = p.block.to(tl.int64) * 0
    if (token >= own.first) & (token < own.first + own.count):
        chosen = tl.load(p.logits + token)
        store_shared(record, number | float_bits(chosen))
        key = ordered(chosen) + 1
    gathered, alive = all_gather(four(key), 2 * epoch, alive, p, S, "rank")
    key = tl.sum(pick(gathered, 0), axis=0) - 1  # the other blocks gave zero
    keys = ordered(logit)
    ahead = own.mine & ((keys > key) | ((keys == key) & (own.ids < token)))
    count = tl.sum(ahead.to(tl.int64), axis=0)
    gathered, alive = all_gather(four(count), 2 * epoch + 1, alive, p, S, "rank")
    if p.block == 0:
        store_shared(record + 3, number | (1 + tl.sum(pick(gathered, 0), axis=0)))
    return alive
