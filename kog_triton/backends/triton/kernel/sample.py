"""The choice of a token: every block scores its own rows of the head, all blocks find the same argmax.

A block publishes its best key and its id; all read all candidates and take the largest, the lowest id of equal
ones. Every pass ends so, with or without logits: it is where blocks that ran ahead meet, hear the host's word
and learn that one of them gave up. Keys are float64: a product of a float32 logit and a 24-bit scale is exact,
so is the noise term, and their sum rounds once, whether the compiler fuses or not.
"""

import triton
import triton.language as tl

from kog_triton.backends.request_words import Flag
from kog_triton.backends.triton.kernel.noise import NOISE_SCALE, gumbel, random_word
from kog_triton.backends.triton.kernel.slots import EXPIRED_ID, NO_LOGITS, NONE_ALLOWED_ID, VOID_ID, field
from kog_triton.backends.triton.kernel.sync import store_shared
from kog_triton.backends.triton.kernel.words import POLLED, wait_tagged

GREEDY: tl.constexpr = tl.constexpr(int(Flag.GREEDY))


@triton.jit
def keys_of(logit, ids, position, request):
    """What the ids compete with: their logits, or the draw's sums of logit and noise."""
    key = logit.to(tl.float64)
    if (tl.load(request + field("flags")) & GREEDY) == 0:
        scale = tl.load(request + field("scale")).to(tl.float32, bitcast=True).to(tl.float64)
        seed = request + field("seed")
        r = random_word(ids, position, tl.load(request + field("sample")), tl.load(seed), tl.load(seed + 1))
        key = key * scale + gumbel(r).to(tl.float64) * NOISE_SCALE
    return key


@triton.jit
def best_of(key, left, ids, void):
    """The largest key among the ids that are `left`, and its id: the lowest of equal ones; VOID_ID if any is `void`."""
    key = tl.where(left, key, -float("inf"))
    best = tl.max(key, axis=0)
    best_id = tl.min(tl.where((key == best) & left, ids, NO_LOGITS), axis=0)
    # NaN and +inf must win: +inf carries them to every block, and the id says what it was.
    nan = tl.max(void.to(tl.int32), axis=0)
    best = tl.where(nan != 0, float("inf"), best)
    return best, tl.where(nan != 0, VOID_ID, best_id)


@triton.jit
def argmax(best, best_id, control, epoch, alive, p, S: tl.constexpr):
    """The token of all blocks' best candidate (or why there is none), the host's word, and alive.

    A candidate is key high, key low, id and the host's word, each below its epoch; a block that gave up says so.
    """
    best_id = tl.where(alive == 0, EXPIRED_ID, best_id)
    bits = tl.where(alive == 0, float("inf"), best).to(tl.int64, bitcast=True)
    # One of two buffers: who publishes pass n + 1 may be ahead of who still reads pass n, but of nobody by two.
    candidates = p.wide + S.region("argmax") // 2 + (epoch & 1) * (4 * S.num_blocks)
    own, tag = candidates + p.block, epoch.to(tl.int64) << 32
    store_shared(own, tag | ((bits >> 32) & 0xFFFFFFFF))
    store_shared(own + S.num_blocks, tag | (bits & 0xFFFFFFFF))
    store_shared(own + 2 * S.num_blocks, tag | (best_id.to(tl.int64) & 0xFFFFFFFF))
    store_shared(own + 3 * S.num_blocks, tag | control.to(tl.int64))
    NB: tl.constexpr = max(triton.next_power_of_2(S.num_blocks), POLLED // 4)
    j = tl.arange(0, 4)[:, None] * S.num_blocks + tl.arange(0, NB)[None, :]
    mask = (tl.arange(0, NB) < S.num_blocks)[None, :] & (tl.arange(0, 4) >= 0)[:, None]
    w, alive = wait_tagged(candidates + j, mask, epoch, alive, "sample argmax", p, S)
    part = tl.arange(0, 4)[:, None]
    high = tl.sum(tl.where(part == 0, w, 0), axis=0)
    low = tl.sum(tl.where(part == 1, w, 0), axis=0)
    ids = tl.sum(tl.where(part == 2, w, 0), axis=0).to(tl.int32)
    control = tl.sum(tl.sum(tl.where((part == 3) & (j == 3 * S.num_blocks), w, 0), axis=0), axis=0)
    valid = tl.arange(0, NB) < S.num_blocks
    key = tl.where(valid, ((high << 32) | low).to(tl.float64, bitcast=True), -float("inf"))
    best = tl.max(key, axis=0)
    token = tl.min(tl.where(valid & (key == best), ids, NO_LOGITS), axis=0)
    token = tl.where(best == -float("inf"), NONE_ALLOWED_ID, token)
    return token, control.to(tl.int32), alive
