"""Integer exponentials and logarithms: the arithmetic that makes every backend draw the same token.

Floating-point exp and log differ from one device to the next, and sums depend on their order. Here
weights and noise are integers made by shifts and 32-bit multiplies, so a kernel can equal them bit
for bit. mulhi(a, b) is the upper half of a 32 x 32 -> 64 bit product; >> rounds down; all values
unsigned unless said otherwise.

weight(e), 2^40 times 2^(-e / 2^26), for an integer distance 0 <= e:
    n = e >> 26;  x = (e & (2^26 - 1)) << 6                        x / 2^32 is the fraction
    a = EXP2[7];  for k = 6 .. 0:  a = EXP2[k] - mulhi(a, x)       in (2^30, 2^31]
    w = (a << 9) >> n        64 bits wide;  0 when n > 40
    |w - 2^40 * 2^(-e / 2^26)| <= 1 + w * 2^-28, and weight(0) = 2^40 exactly

log2_bits(m, b), the first b bits of log2(m / 2^31) for 2^31 <= m < 2^32, one bit by one squaring:
    repeat b times:  m = mulhi(m, m);  bit = m >> 31;  if not bit: m = m << 1;  out = out << 1 | bit
    never above the true value; below it by less than 2^-b + 2^-29.4

gumbel(r), 2^24 * log2(-log2 U) with U = (r + 1/2) / 2^32, signed, |G| < 2^30:
    s = ~r
    s < 2^22 (U near 1; v / 2^33 = 1 - U; -ln U = V + V^2 / 2 keeps the tail's relative precision):
        v = 2 s + 1;  y = (v << 8) + mulhi(v << 3, v << 3)          y / 2^41 = -ln U
        G = LOG2(y) - (41 << 24) + LOG2_LOG2E
    else:
        n = bit length of r;  m = r, or (2 r + 1) << (31 - n) if n < 32    normalized 2 r + 1
        y = ((33 - n) << 31) - log2_bits(m, 31)                     64 bits wide; y / 2^31 = -log2 U
        G = LOG2(y) - (31 << 24)
    where LOG2(y) = (p << 24) + log2_bits(y's upper 32 bits from its leading one, at bit p, on, 24)
    |G / 2^24 - log2(-log2 U)| < 2^-19
"""

import numpy as np

WEIGHT_BITS = 40
DISTANCE_BITS = 26  # an integer distance e stands for 2^(-e / 2^26)
MAX_DISTANCE = (WEIGHT_BITS + 1) << DISTANCE_BITS  # from here on weights are zero

# -ln 2 / 2^24 rounded to 20 bits, relative error 7e-7: gumbel(r) times it is noise of the definition
NOISE_SCALE = -726817 * 2.0**-44

# 2^31 times the coefficients, signs alternating, of 1 - x q(x) ~ 2^-x on [0, 1]: q interpolates
# (1 - 2^-x) / x at the seven Chebyshev points of [0, 1]; relative error below 2^-32
EXP2 = (2147483648, 1488522236, 515882469, 119193747, 20652244, 2856024, 319744, 24275)

GUMBEL_BITS = 24
GUMBEL_ERROR = 2.0**-19  # bound on |G / 2^24 - log2(-log2 U)|
TAIL = 1 << 22  # ~r below this takes the series
LOG2_LOG2E = 8871228  # round(2^24 * log2(log2 e))


def weight(distance: np.ndarray) -> np.ndarray:
    """2^40 * 2^(-distance / 2^26) as int64; distances are int64 from 0 to MAX_DISTANCE."""
    x = (distance & ((1 << DISTANCE_BITS) - 1)) << 6
    a = np.full_like(distance, EXP2[7])
    for coefficient in EXP2[6::-1]:
        a *= x
        a >>= 32
        np.subtract(coefficient, a, out=a)
    a <<= 9
    a >>= distance >> DISTANCE_BITS
    return a


def log2_bits(mantissa: np.ndarray, bits: int) -> np.ndarray:
    """The first bits of log2(mantissa / 2^31), mantissa uint64 in [2^31, 2^32): int64."""
    m = mantissa.astype(np.uint64)
    out = np.zeros(m.shape, np.int64)
    for _ in range(bits):
        m = (m * m) >> np.uint64(32)
        bit = m >> np.uint64(31)
        m <<= np.uint64(1) - bit
        out = (out << 1) | bit.astype(np.int64)
    return out


def bit_length(value: np.ndarray) -> np.ndarray:
    """How many bits each uint64 below 2^53 needs: int64."""
    return np.frexp(value.astype(np.float64))[1].astype(np.int64)


def log2_fixed(value: np.ndarray) -> np.ndarray:
    """2^24 * log2(value), rounded down on the leading 32 bits, for 0 < value < 2^53: int64."""
    top = bit_length(value) - 1
    up = np.maximum(31 - top, 0).astype(np.uint64)
    down = np.maximum(top - 31, 0).astype(np.uint64)
    return (top << GUMBEL_BITS) + log2_bits((value << up) >> down, GUMBEL_BITS)


def gumbel(words: np.ndarray) -> np.ndarray:
    """G of each random word (uint32): int64; -ln 2 * G / 2^24 is Gumbel noise up to a constant."""
    r = words.astype(np.uint64)
    v = 2 * (np.uint64(0xFFFFFFFF) - r) + np.uint64(1)
    tail = v < 2 * TAIL
    v = np.where(tail, v, 1)  # where the other branch holds, any small value does
    square = (v << np.uint64(3)) ** 2 >> np.uint64(32)
    near_one = log2_fixed((v << np.uint64(8)) + square) - (41 << GUMBEL_BITS) + LOG2_LOG2E
    n = bit_length(r)
    m = np.where(n == 32, r, (2 * r + np.uint64(1)) << np.maximum(31 - n, 0).astype(np.uint64))
    y = ((33 - n) << 31) - log2_bits(m, 31)
    y = np.where(tail, 1 << 31, y).astype(np.uint64)
    return np.where(tail, near_one, log2_fixed(y) - (31 << GUMBEL_BITS))
