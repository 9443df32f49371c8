"""The integers of sampling (sampling/philox.py and fixed.py define them): random words, noise, weights, logarithms."""

import triton
import triton.language as tl

from kog_triton.sampling import fixed

NOISE_SCALE: tl.constexpr = tl.constexpr(fixed.NOISE_SCALE)
LOG2_LOG2E: tl.constexpr = tl.constexpr(fixed.LOG2_LOG2E)
MAX_DISTANCE: tl.constexpr = tl.constexpr(fixed.MAX_DISTANCE)


@triton.jit
def random_word(ids, position, sample, seed_low, seed_high):
    """Philox4x32-10 of (id >> 2, position, sample, 0) under the seed, word id & 3: uint32."""
    zero = ids * 0
    c0, c1 = (ids >> 2).to(tl.uint32), (position + zero).to(tl.uint32)
    c2, c3 = (sample + zero).to(tl.uint32), zero.to(tl.uint32)
    k0 = (seed_low + zero).to(tl.uint32, bitcast=True)
    k1 = (seed_high + zero).to(tl.uint32, bitcast=True)
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
    for _ in range(BITS):
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
def bit_length_64(x):
    """Bits that any uint64 needs."""
    upper = x >> 32
    return tl.where(upper != 0, 32 + bit_length(upper), bit_length(x & 0xFFFFFFFF))


@triton.jit
def log2_fixed(x):
    """2^24 * log2(x), rounded down on the leading 32 bits, for 0 < x < 2^53."""
    return log2_of_length(x, bit_length(x))


@triton.jit
def log2_of_length(x, length):
    top = length - 1
    up, down = tl.maximum(31 - top, 0), tl.maximum(top - 31, 0)
    return (top << 24) + log2_bits((x << up.to(tl.uint64)) >> down.to(tl.uint64), 24)


@triton.jit
def gumbel(words):
    """G of each random word (kog_triton/sampling/fixed.py): int64."""
    r = words.to(tl.uint64)
    v = 2 * (0xFFFFFFFF - r) + 1
    tail = v < (1 << 23)
    near_one = (v << 8) + (((v << 3) * (v << 3)) >> 32)
    n = bit_length(r)
    m = tl.where(n == 32, r, (2 * r + 1) << tl.maximum(31 - n, 0).to(tl.uint64))
    y = ((33 - n) << 31) - log2_bits(m, 31)
    return log2_fixed(tl.where(tail, near_one, y.to(tl.uint64))) - tl.where(tail, (41 << 24) - LOG2_LOG2E, 31 << 24)


@triton.constexpr_function
def exp2_coefficient(k):
    return fixed.EXP2[k]


@triton.jit
def weight(distance):
    """2^40 * 2^(-distance / 2^26), int64, of float64 distances from 0 on, rounded down and at most MAX_DISTANCE."""
    distance = tl.minimum(distance, MAX_DISTANCE * 1.0).to(tl.int64)
    x = (distance & 0x3FFFFFF) << 6
    a = x * 0 + exp2_coefficient(7)
    for k in tl.static_range(7):
        a = exp2_coefficient(6 - k) - ((a * x) >> 32)
    return (a << 9) >> (distance >> 26)
