"""Sampling in the kernel: the definition of kog_triton/sampling, bit for bit.

Every block scores its own rows of the head and publishes its best key; all blocks read all candidates and
pick the same one. Keys are float64: a product of a float32 logit and a 24-bit scale is exact, so is the noise
term, and their sum rounds once, whether the compiler fuses or not.

    request (int32): 0 first position   1 known tokens   2 tokens to make   3 stop ids   4 greedy
                     5, 6 seed   7 sample index   8 scale = 1 / temperature (float32 bits)
                     9 logits of every position, a row each      16 .. 31 stop ids
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.sync import load_shared
from kog_triton.backends.triton.words import POLLED, report

NOISE_SCALE: tl.constexpr = tl.constexpr(-726817 * 2.0**-44)
LOG2_LOG2E: tl.constexpr = tl.constexpr(8871228)


@triton.jit
def start_candidate(logits, first, count, position, p, S: tl.constexpr):
    """The best key of logits [first, first + count) and its id; ties go to the lowest id."""
    ROWS: tl.constexpr = triton.next_power_of_2(S.stages[4].block_rows)
    i = tl.arange(0, ROWS)
    logit = tl.load(logits + first + i, mask=i < count, other=-float("inf"))
    key = logit.to(tl.float64)
    if tl.load(p.request + 4) == 0:
        scale = tl.load(p.request + 8).to(tl.float32, bitcast=True).to(tl.float64)
        seed_low, seed_high = tl.load(p.request + 5), tl.load(p.request + 6)
        r = random_word(first + i, position, tl.load(p.request + 7), seed_low, seed_high)
        noise = gumbel(r).to(tl.float64) * NOISE_SCALE
        key = tl.where(i < count, key * scale + noise, -float("inf"))
    best = tl.max(key, axis=0)
    void = (logit != logit) | (logit == float("inf"))
    nan = tl.max((void & (i < count)).to(tl.int32), axis=0)
    best_id = tl.min(tl.where((key == best) & (i < count), first + i, 0x7FFFFFFF), axis=0)
    # NaN and +inf must win: +inf carries them to every block, and id -1 says what it was.
    best = tl.where(nan != 0, float("inf"), best)
    return best, tl.where(nan != 0, -1, best_id)


@triton.jit
def random_word(ids, position, sample, seed_low, seed_high):
    """Philox4x32-10 of (id >> 2, position, sample, 0) under the seed, word id & 3: uint32."""
    zero = ids * 0
    c0, c1 = (ids >> 2).to(tl.uint32), (position + zero).to(tl.uint32)
    c2, c3 = (sample + zero).to(tl.uint32), zero.to(tl.uint32)
    k0, k1 = (
        (seed_low + zero).to(tl.uint32, bitcast=True),
        (seed_high + zero).to(tl.uint32, bitcast=True),
    )
    for _ in tl.static_range(10):
        high0, low0 = wide_multiply(c0, 0xD2511F53)
        high2, low2 = wide_multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    word = ids & 3
    return tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))


@triton.jit
def wide_multiply(a, B: tl.constexpr):
    """Upper and lower half of a 32 x 32 bit product."""
    wide = a.to(tl.uint64) * B
    return (wide >> 32).to(tl.uint32), wide.to(tl.uint32)


@triton.jit
def log2_bits(m, BITS: tl.constexpr):
    """The first BITS bits of log2(m / 2^31), 2^31 <= m < 2^32 in uint64 (kog_triton/sampling/fixed.py)."""
    out = (m * 0).to(tl.int64)
    for _ in tl.static_range(BITS):
        m = (m * m) >> 32
        bit = m >> 31
        m = tl.where(bit != 0, m, m << 1)
        out = (out << 1) | bit.to(tl.int64)
    return out


@triton.jit
def bit_length(x):
    """Bits that a uint64 below 2^53 needs: its float64 exponent."""
    e = (x.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022
    return tl.where(x == 0, 0, e)


@triton.jit
def log2_fixed(x):
    """2^24 * log2(x), rounded down on the leading 32 bits."""
    top = bit_length(x) - 1
    up, down = tl.maximum(31 - top, 0), tl.maximum(top - 31, 0)
    return (top << 24) + log2_bits((x << up.to(tl.uint64)) >> down.to(tl.uint64), 24)


@triton.jit
def gumbel(words):
    """G of each random word (kog_triton/sampling/fixed.py): int64."""
    r = words.to(tl.uint64)
    v = 2 * (0xFFFFFFFF - r) + 1
    tail = v < (1 << 23)
    v = tl.where(tail, v, 1)
    square = ((v << 3) * (v << 3)) >> 32
    near_one = log2_fixed((v << 8) + square) - (41 << 24) + LOG2_LOG2E
    n = bit_length(r)
    m = tl.where(n == 32, r, (2 * r + 1) << tl.maximum(31 - n, 0).to(tl.uint64))
    y = ((33 - n) << 31) - log2_bits(m, 31)
    y = tl.where(tail, 1 << 31, y).to(tl.uint64)
    return tl.where(tail, near_one, log2_fixed(y) - (31 << 24))


@triton.jit
def publish_candidate(best, best_id, epoch, block, p, S: tl.constexpr):
    """Key high, key low, id and the host's word, each with its epoch above it."""
    bits = best.to(tl.int64, bitcast=True)
    control = block * 0
    if block == 0:
        # The host's word comes into everybody's hands with the candidates, so all act on it at one token.
        control = tl.load(p.mailbox, volatile=True).to(tl.int32)
    at = p.winners + block
    tag = epoch.to(tl.int64) << 32
    store_word(at, tag | ((bits >> 32) & 0xFFFFFFFF))
    store_word(at + S.num_blocks, tag | (bits & 0xFFFFFFFF))
    store_word(at + 2 * S.num_blocks, tag | (best_id.to(tl.int64) & 0xFFFFFFFF))
    store_word(at + 3 * S.num_blocks, tag | control.to(tl.int64))


@triton.jit
def store_word(ptr, value):
    tl.store(ptr, value, cache_modifier=".wt")


@triton.jit
def winner(epoch, alive, where, p, S: tl.constexpr):
    """The token of the best candidate, the host's word, and alive."""
    NB: tl.constexpr = max(triton.next_power_of_2(S.num_blocks), POLLED // 4)
    j = tl.arange(0, 4)[:, None] * S.num_blocks + tl.arange(0, NB)[None, :]
    mask = (tl.arange(0, NB) < S.num_blocks)[None, :] & (tl.arange(0, 4) >= 0)[:, None]
    tag = epoch.to(tl.int64)
    w = load_shared(p.winners + j, mask, tag << 32, S)
    bad = tl.max(((w >> 32) != tag).to(tl.int32))
    tries = 0
    while (bad != 0) & (tries < p.limit * alive):
        w = load_shared(p.winners + j, mask, tag << 32, S)
        bad = tl.max(((w >> 32) != tag).to(tl.int32))
        tries += 1
    alive = report(bad, alive, where, p)
    part = tl.arange(0, 4)[:, None]
    w = w & 0xFFFFFFFF
    high = tl.sum(tl.where(part == 0, w, 0), axis=0)
    low = tl.sum(tl.where(part == 1, w, 0), axis=0)
    ids = tl.sum(tl.where(part == 2, w, 0), axis=0).to(tl.int32)
    control = tl.sum(tl.sum(tl.where((part == 3) & (j == 3 * S.num_blocks), w, 0), axis=0), axis=0)
    valid = tl.arange(0, NB) < S.num_blocks
    key = tl.where(valid, ((high << 32) | low).to(tl.float64, bitcast=True), -float("inf"))
    best = tl.max(key, axis=0)
    token = tl.min(tl.where(valid & (key == best), ids, 0x7FFFFFFF), axis=0)
    return token, control.to(tl.int32), alive
