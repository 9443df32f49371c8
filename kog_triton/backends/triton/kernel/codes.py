"""Tiles of narrow weights: codes meet operands in registers, and what they sum up to is multiplied by its scale.

schedule/triton_codes.py says how a tile lies in memory. Here it is a tuple: stored words in the shape of a tile of
16-bit words, and what belongs to a thread's four of them: a scale, then a zero point if there are such. All of them are
on their way together.

Codes that are whole numbers stay such, four to a word, and are multiplied as signed bytes by operands that are whole
numbers of 16 bits: two bytes, 256 h + l, and a unit that the operands of a thread's four words share, by which the
largest of them is LARGEST. So an operand is off by 2^-16 of the largest of its 32 (int8: 16) at most, where a bfloat16
is off by 2^-9 of itself; sums are exact. E4M3's bits become those of a float32 that is 2^120 too small, a subnormal one
included.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.sync import (
    bytes_of,
    converts_e4m3,
    dot4,
    e4m3_as_f16,
    pin,
)
from kog_triton.backends.triton.kernel.words import LINE, f16_high, f16_low, high, low

E4M3_UNIT: tl.constexpr = tl.constexpr(2.0**120)
# Sign, exponent and mantissa as a float32 has them: 0x87f00000.
E4M3_BITS: tl.constexpr = tl.constexpr(-0x78100000)
LARGEST: tl.constexpr = tl.constexpr(127 * 256.0)
# Its last bit counts for one, so that what is added to it stands in its mantissa as a whole number; half of a byte more
# rounds h and leaves l + 128.
ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2**23 + 128)
LEAST: tl.constexpr = tl.constexpr(1e-30)  # of the largest operand, whose inverse is finite
ONE_EACH: tl.constexpr = tl.constexpr(0x01010101)  # four bytes of one
SIGN_EACH: tl.constexpr = tl.constexpr(-0x7F7F7F80)  # the highest bit of each byte
HIGH_FOUR: tl.constexpr = tl.constexpr(-0x0F0F0F10)  # the four highest


@triton.jit
def e4m3_values(w, S: tl.constexpr):
    """The four E4M3 codes of each word, float32."""
    if converts_e4m3(S):
        first, second = e4m3_as_f16(w)
        return f16_low(first), f16_high(first), f16_low(second), f16_high(second)
    else:
        values = ()
        for i in tl.static_range(4):
            bits = ((w << (24 - 8 * i)) >> 4) & E4M3_BITS
            values = values + (bits.to(tl.float32, bitcast=True) * E4M3_UNIT,)
        return values


@triton.jit
def load_beside(ptr, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr):
    """Scales or zero points of a tile, for every four stored words; `ptr` is where the tile has them."""
    WORDS: tl.constexpr = T.stored_width(K)
    WIDE: tl.constexpr = min(WORDS, LINE)
    GROUPS: tl.constexpr = T.codes.groups(T.widths[K])
    EACH: tl.constexpr = WORDS // GROUPS  # that share one of them
    r, c, t = tl.arange(0, T.tile_rows), tl.arange(0, WORDS // WIDE), tl.arange(0, WIDE // 4)
    if AXIS == 1:
        word = c[None, :, None] * WIDE + 4 * t[None, None, :]
        return tl.load(ptr + (r[:, None, None] * GROUPS + word // EACH))
    else:
        word = c[:, None, None] * WIDE + 4 * t[None, None, :]
        return tl.load(ptr + (r[None, :, None] * GROUPS + word // EACH))


@triton.jit
def with_scales(w, ptr, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr):
    """The tile of stored words w, which begins at `ptr`."""
    SCALES: tl.constexpr = T.tile_rows * T.stored_width(K)
    tile = (w, load_beside(ptr + SCALES, S, T, K, AXIS))
    if T.codes.zero_points:
        ZEROS: tl.constexpr = SCALES + T.tile_rows * T.codes.groups(T.widths[K])
        return tile + (load_beside(ptr + ZEROS, S, T, K, AXIS),)
    else:
        return tile


@triton.jit
def by_fours(w):
    """The last dimension as fours of neighbors, which a thread has."""
    if len(w.shape) == 2:
        return tl.reshape(w, (w.shape[0], w.shape[1] // 4, 4))
    else:
        return tl.reshape(w, (w.shape[0], w.shape[1], w.shape[2] // 4, 4))


@triton.jit
def for_each(v, SHAPE: tl.constexpr):
    """What belongs to fours, for each of them."""
    return tl.reshape(tl.broadcast_to(tl.expand_dims(v, len(v.shape)), v.shape + (4,)), SHAPE)


@triton.jit
def parts_of(x, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """Operands x of tile K as a tuple: those that meet the first two codes of each stored word, the next two, and so
    on, each in a layout that it keeps; of whole numbers as `whole_numbers`."""
    WORDS: tl.constexpr = T.stored_width(K)
    WIDE: tl.constexpr = min(WORDS, LINE)
    if T.pack == 2:
        parts = tl.split(tl.reshape(x, (WORDS // WIDE, WIDE, 2)))
    else:
        even, odd = tl.split(tl.reshape(x, (WORDS // WIDE, WIDE, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        parts = (a, b, c, d)
    if T.codes.is_e4m3:
        return pin(parts[0], S), pin(parts[1], S)
    else:
        return whole_numbers(parts, S, T)


@triton.jit
def whole_numbers(parts, S: tl.constexpr, T: tl.constexpr):
    """Operands as bytes: for each word of codes in a stored one (`codes_in`) h and l; then, of every four stored words,
    the unit of what they sum up to; then, for zero points, the operands' sum."""
    PACK: tl.constexpr = T.pack
    largest = tl.zeros_like(parts[0])  # bits of floats without a sign: a NaN's are more than any other's
    for i in tl.static_range(PACK):
        both = tl.maximum(
            tl.abs(low(parts[i], S)).to(tl.int32, bitcast=True),
            tl.abs(high(parts[i], S)).to(tl.int32, bitcast=True),
        )
        largest = tl.maximum(largest, both)
    largest = tl.max(by_fours(largest), axis=2).to(tl.float32, bitcast=True)
    largest = tl.where(largest < LEAST, LEAST, largest)
    inverse = for_each(1.0 / largest * LARGEST, parts[0].shape)
    xs = ()
    sum_h, sum_l = tl.zeros_like(parts[0]), tl.zeros_like(parts[0])
    ones = tl.full(parts[0].shape, ONE_EACH, tl.int32)
    for half in tl.static_range(PACK // 2):
        if PACK == 2:
            a, b = parts
            vs = (low(a, S), high(a, S), low(b, S), high(b, S))
        elif half == 0:
            vs = (low(parts[0], S), low(parts[1], S), low(parts[2], S), low(parts[3], S))
        else:
            vs = (high(parts[0], S), high(parts[1], S), high(parts[2], S), high(parts[3], S))
        us = ()
        for n in tl.static_range(4):
            us = us + ((vs[n] * inverse + ROUNDER).to(tl.int32, bitcast=True),)
        first, second = bytes_of(us[0], us[1], 0x5140, S), bytes_of(us[2], us[3], 0x5140, S)
        h = pin(bytes_of(first, second, 0x7632, S), S)
        l = pin(bytes_of(first, second, 0x5410, S) ^ SIGN_EACH, S)
        xs = xs + (h, l)
        sum_h, sum_l = dot4(ones, h, sum_h, S), dot4(ones, l, sum_l, S)
    unit = pin((largest / (LARGEST * T.codes.lift)).to(tl.int32, bitcast=True), S)
    if T.codes.zero_points:
        total = tl.sum(by_fours((sum_h << 8) + sum_l), axis=2).to(tl.float32) * T.codes.lift
        return xs + (unit, pin(total.to(tl.int32, bitcast=True), S))
    else:
        return xs + (unit,)


@triton.jit
def codes_in(w, HALF: tl.constexpr, T: tl.constexpr):
    """Four codes of each stored word as signed bytes, `lift` times as large: of eight the even ones, then the odd."""
    if T.pack == 2:
        return w
    elif HALF == 0:
        return (w << 4) & HIGH_FOUR
    else:
        return w & HIGH_FOUR


@triton.jit
def sums_of_codes(tile, xs, S: tl.constexpr, T: tl.constexpr, AXIS: tl.constexpr):
    """A tile times operands `parts_of`: of every four stored words of a row, times their scale."""
    w = tile[0]
    PACK: tl.constexpr = T.pack
    if T.codes.is_e4m3:
        SHAPE: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // 4, 8)
        total = tl.zeros((w.shape[0], w.shape[1], w.shape[2] // 4), tl.float32)
        values = e4m3_values(w, S)
        for i in tl.static_range(PACK):
            x = tl.expand_dims(xs[i], 1 - AXIS)
            both = tl.join(values[2 * i] * low(x, S), values[2 * i + 1] * high(x, S))
            total += tl.sum(tl.reshape(both, SHAPE), axis=3)
        return total * tile[1].to(tl.float32, bitcast=True)
    else:
        sum_h, sum_l = tl.zeros_like(w), tl.zeros_like(w)
        for half in tl.static_range(PACK // 2):
            codes = codes_in(w, half, T)
            sum_h = dot4(codes, tl.expand_dims(xs[2 * half], 1 - AXIS), sum_h, S)
            sum_l = dot4(codes, tl.expand_dims(xs[2 * half + 1], 1 - AXIS), sum_l, S)
        total = (tl.sum(by_fours(sum_h), axis=3) << 8) + tl.sum(by_fours(sum_l), axis=3)
        total = total.to(tl.float32)
        unit = tl.expand_dims(xs[PACK], 1 - AXIS).to(tl.float32, bitcast=True)
        if T.codes.zero_points:
            of_operands = tl.expand_dims(xs[PACK + 1], 1 - AXIS).to(tl.float32, bitcast=True)
            total -= tile[2].to(tl.float32, bitcast=True) * of_operands
        return total * (tile[1].to(tl.float32, bitcast=True) * unit)
