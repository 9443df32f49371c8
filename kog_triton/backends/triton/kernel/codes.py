"""Tiles of narrow weights: codes become float32 in registers, and what they sum up to is multiplied by its scale.

schedule/triton_codes.py says how a tile lies in memory. Here it is a tuple: stored words in the shape of a tile of
16-bit words, and what belongs to a thread's four of them: a scale, then a zero point if there are such. All of them are
on their way together.

A code that is a whole number n is put into the mantissa of a power of two whose last bit counts for one of it, and
what that and the zero point are is subtracted: exact, and without a conversion. E4M3's bits are those of a float32 that
is 2^120 too small, a subnormal one included.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.sync import picked, pin
from kog_triton.backends.triton.kernel.words import LINE, high, low

E4M3_UNIT: tl.constexpr = tl.constexpr(2.0**120)
# Sign, exponent and mantissa as a float32 has them: 0x87f00000.
E4M3_BITS: tl.constexpr = tl.constexpr(-0x78100000)


@triton.constexpr_function
def place_of(T, number):
    return T.codes.place(number)


@triton.jit
def value_of(w, less, NUMBER: tl.constexpr, S: tl.constexpr, T: tl.constexpr):
    """Code NUMBER of each word, less `less`, float32."""
    if T.codes.is_e4m3:
        up = w << (24 - 8 * NUMBER)
        return ((up >> 4) & E4M3_BITS).to(tl.float32, bitcast=True) * E4M3_UNIT
    else:
        PLACE: tl.constexpr = place_of(T, NUMBER)
        v = picked(w >> PLACE[0], PLACE[1], PLACE[2], S)
        return v.to(tl.float32, bitcast=True) - (less + PLACE[3])


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
def parts_of(x, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """Operands x of tile K as a tuple: those that meet the first two codes of each stored word, the next two, and so
    on, each in a layout that it keeps."""
    WORDS: tl.constexpr = T.stored_width(K)
    WIDE: tl.constexpr = min(WORDS, LINE)
    if T.pack == 2:
        a, b = tl.split(tl.reshape(x, (WORDS // WIDE, WIDE, 2)))
        return pin(a, S), pin(b, S)
    else:
        even, odd = tl.split(tl.reshape(x, (WORDS // WIDE, WIDE, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return pin(a, S), pin(b, S), pin(c, S), pin(d, S)


@triton.jit
def sums_of_codes(tile, xs, S: tl.constexpr, T: tl.constexpr, AXIS: tl.constexpr):
    """A tile times operands `parts_of`: of every four stored words of a row, times their scale."""
    w = tile[0]
    PACK: tl.constexpr = T.pack
    SHAPE: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // 4, 8)
    less = T.codes.zero
    if T.codes.zero_points:
        FOURS: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // 4, 4)
        own = tile[2].to(tl.float32, bitcast=True)
        less = tl.reshape(tl.broadcast_to(tl.expand_dims(own, 3), FOURS), w.shape) + less
    total = tl.zeros((w.shape[0], w.shape[1], w.shape[2] // 4), tl.float32)
    for i in tl.static_range(PACK):
        x = tl.expand_dims(xs[i], 1 - AXIS)
        first = value_of(w, less, 2 * i, S, T) * low(x, S)
        second = value_of(w, less, 2 * i + 1, S, T) * high(x, S)
        total += tl.sum(tl.reshape(tl.join(first, second), SHAPE), axis=3)
    return total * tile[1].to(tl.float32, bitcast=True)
