"""Philox against its published vectors; integer logarithms and weights against float64."""

import math

import numpy as np
import pytest

from kog_triton.sampling import fixed
from kog_triton.sampling.philox import philox4x32, random_words, vocab_words

# Random123 1.14, examples/kat_vectors: philox4x32 10: counter, key, output
KNOWN_ANSWERS = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words_of(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected):
    k0, k1 = words_of(key)
    columns = np.tile(np.array(words_of(counter), np.uint32)[:, None], 3)
    out = philox4x32(columns, (k0, k1))
    assert out.dtype == np.uint32
    assert out.T.tolist() == [words_of(expected)] * 3


def plain_word(token: int, position: int, sample_idx: int, seed: int) -> int:
    """Philox in Python integers, one counter."""
    c = [token >> 2, position, sample_idx, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[token & 3]


def test_words_depend_on_id_position_sample_and_seed_as_specified():
    seed = 0xDEADBEEF_12345678
    whole = vocab_words(103, 77, 2, seed)
    assert whole.tolist() == [plain_word(i, 77, 2, seed) for i in range(103)]
    ids = np.array([101, 0, 3, 50])
    assert random_words(ids, 77, 2, seed).tolist() == whole[ids].tolist()
    grid = random_words(np.arange(6)[None], np.array([[5], [4_000_000_000]]), 0, 9)
    assert grid[1].tolist() == [plain_word(i, 4_000_000_000, 0, 9) for i in range(6)]


def edge_words() -> np.ndarray:
    powers = [1 << k for k in range(32)]
    near = [p + d for p in powers for d in (-2, -1, 0, 1, 2)]
    near += [(1 << 32) - 1 - p + d for p in powers for d in (-1, 0, 1)]
    near += [0, (1 << 32) - 1]
    return np.array(sorted({r for r in near if 0 <= r < 1 << 32}), np.uint32)


def exact_noise(words: np.ndarray) -> np.ndarray:
    """log2(-log2 U) in float64; log1p keeps U near 1 exact."""
    r = words.astype(np.float64)
    minus_ln = np.where(r < 2.0**31, -np.log((r + 0.5) / 2**32), -np.log1p(-(2**32 - r - 0.5) / 2**32))
    return np.log2(minus_ln) + math.log2(math.log2(math.e))


def test_gumbel_is_within_its_bound_everywhere():
    random = np.random.default_rng(0).integers(0, 1 << 32, 300_000, dtype=np.uint32)
    seam = np.uint32((1 << 32) - 1 - (1 << 22)) + np.arange(-3000, 3000).astype(np.int64)
    tails = np.concatenate([np.arange(4000), (1 << 32) - 1 - np.arange(4000)])
    words = np.concatenate([edge_words(), random, seam, tails]).astype(np.uint32)
    noise = fixed.gumbel(words)
    assert np.abs(noise / 2.0**24 - exact_noise(words)).max() < fixed.GUMBEL_ERROR
    assert np.abs(noise).max() < 1 << 30


def plain_log2_bits(m: int, bits: int) -> int:
    out = 0
    for _ in range(bits):
        m = m * m >> 32
        bit = m >> 31
        out = out << 1 | bit
        m <<= 1 - bit
    return out


def plain_gumbel(r: int) -> int:
    """The recipe of fixed.py's docstring in Python integers, as a kernel would follow it."""

    def log2(y: int) -> int:
        p = y.bit_length() - 1
        return (p << 24) + plain_log2_bits(y << 31 - p if p < 32 else y >> p - 31, 24)

    s = 0xFFFFFFFF - r
    if s < 1 << 22:
        v = 2 * s + 1
        return log2((v << 8) + ((v << 3) * (v << 3) >> 32)) - (41 << 24) + 8871228
    n = r.bit_length()
    m = r if n == 32 else (2 * r + 1) << 31 - n
    return log2(((33 - n) << 31) - plain_log2_bits(m, 31)) - (31 << 24)


def test_gumbel_follows_its_recipe_bit_for_bit():
    random = np.random.default_rng(1).integers(0, 1 << 32, 500, dtype=np.uint32)
    words = np.concatenate([edge_words(), random])
    assert fixed.gumbel(words).tolist() == [plain_gumbel(int(r)) for r in words]


@pytest.mark.parametrize("bits", [24, 31])
def test_log2_bits_are_within_their_bound(bits):
    random = np.random.default_rng(5).integers(1 << 31, 1 << 32, 200_000, dtype=np.uint64)
    edges = np.array([1 << 31, (1 << 31) + 1, (1 << 32) - 1, 3 << 30], np.uint64)
    mantissa = np.concatenate([edges, random])
    below = np.log2(mantissa / 2.0**31) - fixed.log2_bits(mantissa, bits) / 2.0**bits
    assert below.min() > -1e-15
    assert below.max() < 2.0**-bits + 2.0**-29.4


def test_weights_are_within_their_bound():
    steps = [(n << 26) + d for n in range(41) for d in (0, 1, (1 << 26) - 1)]
    random = np.random.default_rng(2).integers(0, 41 << 26, 300_000)
    distance = np.concatenate([np.array(steps), random])
    exact = 2.0 ** (40 - distance / 2.0**26)
    got = fixed.weight(distance)
    assert (np.abs(got - exact) <= 1 + got * 2.0**-28).all()
    assert fixed.weight(np.array([0])).tolist() == [1 << 40]
    assert fixed.weight(np.array([fixed.MAX_DISTANCE])).tolist() == [0]
    large = distance <= 16 << 26
    assert (np.abs(got / exact - 1)[large] < 2.0**-23.8).all()


def test_weight_follows_its_recipe_bit_for_bit():
    distance = np.random.default_rng(3).integers(0, 41 << 26, 500)
    for e, got in zip(distance.tolist(), fixed.weight(distance).tolist(), strict=True):
        x, a = (e % (1 << 26)) << 6, fixed.EXP2[7]
        for k in range(6, -1, -1):
            a = fixed.EXP2[k] - (a * x >> 32)
        assert got == (a << 9) >> (e >> 26)


def test_noise_has_the_gumbel_distribution():
    words = vocab_words(200_000, 0, 0, 4)
    noise = -math.log(2) * (fixed.gumbel(words) / 2.0**24 + math.log2(math.log(2)))
    # mean is Euler's gamma, variance pi^2 / 6; four standard errors
    assert abs(noise.mean() - 0.5772157) < 4 * math.sqrt(math.pi**2 / 6 / words.size)
    assert abs(noise.var() - math.pi**2 / 6) < 0.04
