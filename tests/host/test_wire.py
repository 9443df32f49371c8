"""Words that carry their own readiness: what a value loses, and what it never loses.

Every 16-bit value is tried; rounding is judged by torch's conversions and by distances.
"""

import numpy as np
import pytest
import torch

from kog_triton.model.spec import DType
from kog_triton.schedule import wire

HALVES = [DType.BF16, DType.F16]
TORCH = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}
ALL = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def floats(seed=0):
    """float32 of all magnitudes, with ties of both 16-bit types among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 40_000, dtype=np.uint32)
    ties = np.arange(0, 1 << 32, 0x8000, dtype=np.uint64).astype(np.uint32)
    f16_ties = (np.arange(-65600, 65600, dtype=np.float32) / 2048).view(np.uint32)
    # NaNs whose payload lies in the bits that a word does not keep
    nans = np.array([0x7F800001, 0xFF800001, 0x7F80FFFF, 0xFFFFFFFF], np.uint32)
    return np.concatenate([bits, ties, f16_ties, nans]).view(np.float32)


def halves(values, dtype):
    """The oracle's 16-bit rounding, as bits."""
    return torch.from_numpy(values).to(TORCH[dtype]).view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("dtype", HALVES)
def test_sixteen_bits_are_rounded_to_nearest_even(dtype):
    values = floats()
    ours, theirs = wire.to_half(values, dtype), halves(values, dtype)
    nan = np.isnan(values)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])
    assert np.isnan(wire.from_half(ours, dtype)[nan]).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_sixteen_bits_come_back(dtype):
    values = wire.from_half(ALL, dtype)
    theirs = torch.from_numpy(ALL.view(np.int16)).view(TORCH[dtype]).float().numpy()
    np.testing.assert_array_equal(values, theirs)
    kept = ~np.isnan(values)
    np.testing.assert_array_equal(wire.to_half(values, dtype)[kept], ALL[kept])


@pytest.mark.parametrize("phase", [0, 1])
def test_a_float_loses_its_lowest_bit_alone(phase):
    values = floats()
    words = wire.pack_f32(values, phase)
    assert (wire.phases(words) == phase).all()
    back, finite = wire.unpack_f32(words), np.isfinite(values)
    assert (np.isnan(back) == np.isnan(values)).all()
    assert (back[np.isinf(values)] == values[np.isinf(values)]).all()
    x, y = values[finite].astype(np.float64), back[finite].astype(np.float64)
    assert (np.abs(y) <= np.abs(x)).all() and (np.signbit(x) == np.signbit(y)).all()
    normal = np.abs(x) >= np.finfo(np.float32).tiny
    assert (np.abs(x - y)[normal] <= np.abs(x)[normal] * 2.0**-23).all()


def in_word(values, dtype):
    """What a word can hold of 16-bit values: bfloat16 below 2^64, else an infinity."""
    if dtype is DType.F16:
        return values
    return np.where(np.abs(values) >= 2.0**64, np.copysign(np.inf, values), values)


def firsts(values, phase, dtype, beside=0.0):
    """Each value as the first of a pair, there and back."""
    pairs = np.stack([values, np.full_like(values, beside)], 1).ravel()
    words = wire.pack_pair(pairs, phase, dtype)
    assert (wire.phases(words) == phase).all()
    return wire.unpack_pair(words, dtype)[0::2]


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_second_of_a_pair_is_whole(dtype, phase):
    values = wire.from_half(ALL, dtype)
    words = wire.pack_pair(np.stack([np.ones_like(values), values], 1).ravel(), phase, dtype)
    assert (wire.phases(words) == phase).all()
    back = wire.unpack_pair(words, dtype)
    np.testing.assert_array_equal(back[1::2], in_word(values, dtype))
    assert (back[0::2] == 1).all()


@pytest.mark.parametrize("phase", [0, 1])
def test_the_first_of_a_float16_pair_is_rounded_to_fifteen_bits(phase):
    values = wire.from_half(ALL, DType.F16)
    back = firsts(values, phase, DType.F16)
    assert (np.isnan(back) == np.isnan(values)).all()
    even = ALL % 2 == 0
    kept = even & ~np.isnan(values)
    np.testing.assert_array_equal(back[kept], values[kept])
    # An odd pattern lies in the middle of two even ones: the one that is a multiple of four is taken.
    odd = ~even & ~np.isnan(values)
    target = np.where(ALL % 4 == 1, ALL - 1, ALL + 1).astype(np.uint16)
    np.testing.assert_array_equal(back[odd], wire.from_half(target, DType.F16)[odd])


@pytest.mark.parametrize("beside", [0.0, -1.0, np.nan])
@pytest.mark.parametrize("phase", [0, 1])
def test_the_first_of_a_bfloat16_pair_is_whole_but_for_tiny_ones(phase, beside):
    values = wire.from_half(ALL, DType.BF16)
    back, size = firsts(values, phase, DType.BF16, beside), np.abs(values)
    kept = ~(size < 2.0**-63)
    np.testing.assert_array_equal(back[kept], in_word(values, DType.BF16)[kept])
    np.testing.assert_array_equal(back[~kept], np.copysign(2.0**-63, values[~kept]))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_pair_is_rounded_once_to_nearest_even(dtype):
    values = floats()
    values = values[np.isfinite(values) & (np.abs(values) < 2.0**63)]
    values = values[np.abs(values) >= 2.0**-62]
    rounded = wire.from_half(halves(values, dtype), dtype)
    back = wire.unpack_pair(wire.pack_pair(np.repeat(values, 2), 1, dtype), dtype)
    np.testing.assert_array_equal(back[1::2], rounded)
    if dtype is DType.BF16:
        np.testing.assert_array_equal(back[0::2], rounded)


# The largest float16's lowest bit is one: as the first of a pair it is rounded up.
MOST = {DType.F16: (65504.0, np.inf), DType.BF16: (2.0**64 - 2.0**56, 2.0**64 - 2.0**56)}


@pytest.mark.parametrize("dtype", HALVES)
def test_overflow_is_an_infinity_that_shows(dtype):
    most, first = MOST[dtype]
    values = np.array([most, most, -most, -most], np.float32)
    back = wire.unpack_pair(wire.pack_pair(values, 1, dtype), dtype)
    np.testing.assert_array_equal(back, np.array([first, most, -first, -most], np.float32))
    beyond = np.array([3.4028235e38, -3.4028235e38, 2.0**64, -(2.0**64)], np.float32)
    np.testing.assert_array_equal(wire.unpack_pair(wire.pack_pair(beyond, 0, dtype), dtype), np.sign(beyond) * np.inf)


def test_a_fine_pair_is_off_by_its_mantissa_or_by_its_smallest_step():
    """Half a step of the second's ten bits; of the first's nine as well, since it is rounded twice."""
    values = floats()
    values = values[np.abs(values) < 1048000]  # 65,504, float16's largest, times 16
    back = wire.unpack_fine(wire.pack_fine(np.repeat(values, 2), 1)).reshape(-1, 2)
    error, size = np.abs(back - values[:, None].astype(np.float64)), np.abs(values)
    assert (error[:, 0] <= 1.5 * np.maximum(size * 2.0**-10, 2.0**-20)).all()
    assert (error[:, 1] <= np.maximum(size * 2.0**-11, 2.0**-21)).all()
    assert error.max() > 100  # so that neither bound is one of nothing
    with np.errstate(over="ignore"):
        beyond = wire.unpack_fine(wire.pack_fine(np.array([1.1e6, -1.1e6], np.float32), 0))
    assert not np.isfinite(beyond).any()
