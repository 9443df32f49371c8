"""Tiles of narrow weights: codes meet operands in registers, and what they sum up to is multiplied by its scale.

schedule/triton_codes.py says how a tile lies in memory. Here it is a tuple: stored words in the shape of a tile of
16-bit words, and what belongs to a thread's four of them: a scale, then a zero point if there are such. All of them are
on their way together.

Operands come as float16, also where the model is bf16 (`Tiles.fine_pairs`).

Codes that are whole numbers stay such, four to a word, and are multiplied as signed bytes by operands that are whole
numbers of 16 bits: two bytes, 256 h + l, and a unit that all operands of a thread share, a run of K, by which the
largest of them is LARGEST. So an operand is off by 2^-16 of the largest of its run (64 values of a tile 1,024 words
wide) at most, where a float16 is off by 2^-11 of itself; sums are exact as int32, and rounded once to float32.

Codes of E2M1 are multiplied likewise, as bytes of twice what they stand for.

E4M3 becomes float16, two to a word, where an instruction makes it so, as do operands, by a unit of a thread's again,
a power of two: what is more than 2^-17 of the largest stays as it is. Sums of up to eight products are rounded to 11
bits each, then go on as float32: Qwen3-8B's KL off the float32 reference was 2.0e-3, of products in float32 1.9e-3
(benchmarks/triton-log.md#scales). Elsewhere E4M3's bits become those of a float32 that is 2^120 too small, a subnormal
one included.
"""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.sync import (
    bytes_of,
    bytes_of_e2m1,
    converts_e4m3,
    dot4,
    halves_of_e4m3,
    multiply_halves,
    pin,
    rounded_to_halves,
    sum_of_halves,
)
from kog_triton.backends.triton.kernel.words import LINE, f16_high, f16_low

# A tile is loaded as rows, lines along K, words of a line. Triton gives the warps to the first dimension before the
# words up to 3.6, to the last from 3.7 on (3.7.1 and 3.9.0): rows stand there, lines at the other place.
RELEASE = tuple(int(n) for n in triton.__version__.split(".")[:2])
LINES_AXIS: tl.constexpr = tl.constexpr(1 if RELEASE < (3, 7) else 0)
E4M3_UNIT: tl.constexpr = tl.constexpr(2.0**120)
# Sign, exponent and mantissa as a float32 has them: 0x87f00000.
E4M3_BITS: tl.constexpr = tl.constexpr(-0x78100000)
E2M1_UNIT: tl.constexpr = tl.constexpr(2.0**126)
E2M1_BITS: tl.constexpr = tl.constexpr(-0x7E400000)  # likewise: 0x81c00000
LARGEST: tl.constexpr = tl.constexpr(127 * 256.0)
# Bits of a float32: its power of two, and what takes three off that. Eight products of less than 16 with 448, E4M3's
# largest, are less than 57,344 together, and float16 ends at 65,504.
EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)
EIGHT_TIMES: tl.constexpr = tl.constexpr(3 << 23)
# Its last bit counts for one, so that what is added to it stands in its mantissa as a whole number; half of a byte more
# rounds h and leaves l + 128.
ROUNDER: tl.constexpr = tl.constexpr(1.5 * 2**23 + 128)
LEAST: tl.constexpr = tl.constexpr(1e-30)  # of the largest operand, whose inverse is finite
ONE_EACH: tl.constexpr = tl.constexpr(0x01010101)  # four bytes of one
SIGN_EACH: tl.constexpr = tl.constexpr(-0x7F7F7F80)  # the highest bit of each byte
HIGH_FOUR: tl.constexpr = tl.constexpr(-0x0F0F0F10)  # the four highest


@triton.jit
def e4m3_values(w):
    """The four E4M3 codes of each word, float32."""
    return [(((w << (24 - 8 * i)) >> 4) & E4M3_BITS).to(tl.float32, bitcast=True) * E4M3_UNIT for i in (0, 1, 2, 3)]


@triton.jit
def values_of(w, T: tl.constexpr):
    """The values of all codes of words [m, n] in their order, float32 [m, n * codes of a word]; zero points are not yet
    taken off."""
    if T.codes.is_e4m3:
        values = e4m3_values(w)
    else:
        COUNT: tl.constexpr = 2 * T.pack
        BITS: tl.constexpr = 32 // COUNT
        values = ()
        for i in tl.static_range(COUNT):
            first = w << (32 - BITS * (i + 1))
            if T.codes.is_e2m1:
                value = ((first >> 6) & E2M1_BITS).to(tl.float32, bitcast=True) * E2M1_UNIT
            else:
                value = (first >> (32 - BITS)).to(tl.float32)
            values = values + (value,)
    return tl.reshape(stacked(values, 2 * T.pack), (w.shape[0], w.shape[1] * 2 * T.pack))


@triton.jit
def stacked(ts, COUNT: tl.constexpr):
    """COUNT tensors as one, with a last dimension of two for each halving of COUNT."""
    if COUNT == 1:
        return ts[0]
    else:
        pairs = ()
        for i in tl.static_range(COUNT // 2):
            pairs = pairs + (tl.join(ts[i], ts[i + COUNT // 2]),)
        return stacked(pairs, COUNT // 2)


@triton.constexpr_function
def shape_of(T, K):
    """Lines of a row of tile K's stored words, and threads that each read four words of a line."""
    shape = T.tile_shape(K, 1)
    return shape.lines, shape.threads


@triton.constexpr_function
def split_lines(S, T, K):
    """Parts of tile K's lines that have warps of their own, where a tile has fewer rows than there are warps. A warp
    has the same part of every tile: parts are added once a unit, not tile by tile through shared memory."""
    return max(1, min(S.sizes.warps // T.tile_rows, T.stored_width(K) // LINE.value))


@triton.constexpr_function
def sets_of(T, K):
    """Groups that a thread's codes of a row are of."""
    return max(1, T.codes.groups(T.widths[K]) // shape_of(T, K)[1])


@triton.jit
def load_beside(ptr, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """Scales or zero points of a tile, of each row and thread: in the place of lines there are `sets_of`.

    `ptr` is where the tile has them. A warp's rows lie side by side: as few loads as can be, since each that is on its
    way beside the codes costs 0.3 us a tile (benchmarks/triton-log.md#scales).
    """
    SHAPE: tl.constexpr = shape_of(T, K)
    GROUPS: tl.constexpr = T.codes.groups(T.widths[K])
    SETS: tl.constexpr = sets_of(T, K)
    WARPS: tl.constexpr = min(T.tile_rows, S.sizes.warps)
    EACH: tl.constexpr = T.tile_rows // WARPS  # rows of a warp
    row, warp, t = tl.arange(0, EACH), tl.arange(0, WARPS), tl.arange(0, SHAPE[1])
    group = t * GROUPS // SHAPE[1]
    if SETS == 1:
        at = (warp[None, :, None] * GROUPS + group[None, None, :]) * EACH + row[:, None, None]
        return tl.expand_dims(tl.reshape(tl.load(ptr + at), (T.tile_rows, SHAPE[1])), LINES_AXIS)
    else:
        group = group[None, None, None, :] + tl.arange(0, SETS)[None, None, :, None]
        at = (warp[None, :, None, None] * GROUPS + group) * EACH + row[:, None, None, None]
        values = tl.reshape(tl.load(ptr + at), (T.tile_rows, SETS, SHAPE[1]))
        if LINES_AXIS == 1:
            return values
        else:
            return tl.trans(values, (1, 0, 2))


@triton.jit
def with_scales(w, ptr, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """The tile of stored words w, which begins at `ptr`."""
    SCALES: tl.constexpr = T.tile_rows * T.stored_width(K)
    tile = (w, load_beside(ptr + SCALES, S, T, K))
    if T.codes.zero_points:
        ZEROS: tl.constexpr = SCALES + T.tile_rows * T.codes.groups(T.widths[K])
        return tile + (load_beside(ptr + ZEROS, S, T, K),)
    else:
        return tile


# ---- operands: a thread's are a run of K, those of its four words of a line, then of the next line ----


@triton.jit
def in_lines(x, LINES: tl.constexpr):
    """[threads, words of a run] as lines of words."""
    apart = tl.trans(tl.reshape(x, (x.shape[0], LINES, 4)), (1, 0, 2))
    return tl.reshape(apart, (LINES, x.shape[0] * 4))


@triton.jit
def parts_of(x, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """Operands x of tile K as a tuple of lines [.., ..]: those that meet the first two codes of each stored word, then
    the next two, each in a layout that it keeps, then their unit, if any; of whole numbers as `whole_numbers`."""
    SHAPE: tl.constexpr = shape_of(T, K)
    if T.pack == 2:
        parts = tl.split(tl.reshape(x, (SHAPE[1], 4 * SHAPE[0], 2)))
    else:
        even, odd = tl.split(tl.reshape(x, (SHAPE[1], 4 * SHAPE[0], 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        parts = (a, b, c, d)
    if not T.codes.is_e4m3:
        return whole_numbers(parts, S, T, K)
    elif converts_e4m3(S):
        # A power of two, so that operands are what they were: the largest is less than 16 of it.
        unit = (largest_of(parts, S, T).to(tl.int32, bitcast=True) & EXPONENT) - EIGHT_TIMES
        inverse = tl.expand_dims(1.0 / unit.to(tl.float32, bitcast=True), 1)
        a, b = parts
        first = rounded_to_halves(f16_low(a) * inverse, f16_high(a) * inverse, S)
        second = rounded_to_halves(f16_low(b) * inverse, f16_high(b) * inverse, S)
        xs = (pin(in_lines(first, SHAPE[0]), S), pin(in_lines(second, SHAPE[0]), S))
        return xs + (tl.expand_dims(pin(unit, S), 0),)
    else:
        return pin(in_lines(parts[0], SHAPE[0]), S), pin(in_lines(parts[1], SHAPE[0]), S)


@triton.jit
def largest_of(parts, S: tl.constexpr, T: tl.constexpr):
    """The largest operand of a thread, without its sign; a NaN's bits are more than any other's."""
    PACK: tl.constexpr = T.pack
    largest = tl.zeros_like(parts[0])
    for i in tl.static_range(PACK):
        both = tl.maximum(
            tl.abs(f16_low(parts[i])).to(tl.int32, bitcast=True), tl.abs(f16_high(parts[i])).to(tl.int32, bitcast=True)
        )
        largest = tl.maximum(largest, both)
    largest = tl.max(largest, axis=1).to(tl.float32, bitcast=True)
    return tl.where(largest < LEAST, LEAST, largest)


@triton.jit
def whole_numbers(parts, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """Operands as bytes: for each word of codes in a stored one (`codes_in`) h and l, as lines; then a thread's unit of
    what they sum up to; then, for zero points, the sums of operands that meet what is summed up (`sums_of_lines`)."""
    PACK: tl.constexpr = T.pack
    SHAPE: tl.constexpr = shape_of(T, K)
    largest = largest_of(parts, S, T)
    inverse = tl.broadcast_to(tl.expand_dims(1.0 / largest * LARGEST, 1), parts[0].shape)
    rounder = tl.full(parts[0].shape, ROUNDER, tl.float32)
    xs = ()
    total = tl.zeros_like(parts[0])
    ones = tl.full(parts[0].shape, ONE_EACH, tl.int32)
    for half in tl.static_range(PACK // 2):
        if PACK == 2 or T.codes.is_e2m1:
            a, b = parts[2 * half], parts[2 * half + 1]
            vs = [f16_low(a), f16_high(a), f16_low(b), f16_high(b)]
        elif half == 0:
            vs = [f16_low(part) for part in parts]
        else:
            vs = [f16_high(part) for part in parts]
        us = [tl.fma(v, inverse, rounder).to(tl.int32, bitcast=True) for v in vs]
        first, second = bytes_of(us[0], us[1], 0x5140, S), bytes_of(us[2], us[3], 0x5140, S)
        highs = bytes_of(first, second, 0x7632, S)
        lows = bytes_of(first, second, 0x5410, S) ^ SIGN_EACH
        xs = xs + (pin(in_lines(highs, SHAPE[0]), S), pin(in_lines(lows, SHAPE[0]), S))
        total = dot4(ones, lows, dot4(ones, highs, tl.zeros_like(highs), S) * 256 + total, S)
    unit = pin((largest / (LARGEST * T.codes.lift)).to(tl.int32, bitcast=True), S)
    xs = xs + (tl.expand_dims(unit, 0),)
    if T.codes.zero_points:
        sums = tl.trans(tl.sum(tl.reshape(total, (SHAPE[1], SHAPE[0], 4)), axis=2))
        sums = sums_of_lines(tl.expand_dims(sums, 1), S, T, K, 0).to(tl.float32) * T.codes.lift
        sums = tl.reshape(sums, (sums.shape[0], SHAPE[1]))
        return xs + (pin(sums.to(tl.int32, bitcast=True), S),)
    else:
        return xs


# ---- operands of columns, which lie in memory: made once, read by all ----


@triton.constexpr_function
def shapes_of_parts(S, T, K):
    """Lines and words of each of `parts_of`."""
    lines, threads = shape_of(T, K)
    shapes = [(lines, 4 * threads)] * T.pack
    if not T.codes.is_e4m3 or converts_e4m3(S):
        shapes.append((1, threads))
    if T.codes.zero_points:
        shapes.append((lines if sets_of(T, K) > 1 else split_lines(S, T, K), threads))
    return shapes


@triton.jit
def line_by_line(LINES: tl.constexpr, WORDS: tl.constexpr):
    """Where words of lines lie, one line behind the other: [LINES, WORDS]."""
    return tl.arange(0, LINES)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]


@triton.jit
def store_parts(to, xs):
    """What `parts_of` gives, one behind the other."""
    for i in tl.static_range(len(xs)):
        tl.store(to + line_by_line(xs[i].shape[0], xs[i].shape[1]), xs[i])
        to += xs[i].numel


@triton.jit
def load_parts(ptr, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """What `store_parts` stored, with a copy for every warp that has rows of its own, in the place of a tile's rows."""
    COPIES: tl.constexpr = min(T.tile_rows, S.sizes.warps)
    SHAPES: tl.constexpr = shapes_of_parts(S, T, K)
    copy = tl.expand_dims(tl.expand_dims(tl.arange(0, COPIES), LINES_AXIS), 2)
    xs = ()
    for i in tl.static_range(len(SHAPES)):
        j = tl.expand_dims(line_by_line(SHAPES[i][0], SHAPES[i][1]), 1 - LINES_AXIS)
        xs = xs + (tl.load(ptr + (j + copy * 0)),)
        ptr += SHAPES[i][0] * SHAPES[i][1]
    return xs


@triton.jit
def for_rows(x, ROWS: tl.constexpr):
    """Lines x of operands beside those of a tile: the same for all rows, or a copy each."""
    if len(x.shape) == 2:
        return tl.expand_dims(x, 1 - LINES_AXIS)
    elif x.shape[1 - LINES_AXIS] == ROWS:
        return x
    elif LINES_AXIS == 1:
        EACH: tl.constexpr = (ROWS // x.shape[0], x.shape[0], x.shape[1], x.shape[2])
        return tl.reshape(tl.broadcast_to(tl.expand_dims(x, 0), EACH), (ROWS, EACH[2], EACH[3]))
    else:
        EACH: tl.constexpr = (x.shape[0], ROWS // x.shape[1], x.shape[1], x.shape[2])
        return tl.reshape(tl.broadcast_to(tl.expand_dims(x, 1), EACH), (EACH[0], ROWS, EACH[3]))


# ---- a tile times them ----


@triton.jit
def codes_in(w, HALF: tl.constexpr, S: tl.constexpr, T: tl.constexpr):
    """Four codes of each stored word as signed bytes, `lift` times as large: of eight whole numbers the even ones, then
    the odd; of E2M1 the first four, then the last."""
    if T.pack == 2:
        return w
    elif T.codes.is_e2m1:
        return bytes_of_e2m1(w, HALF, S)
    elif HALF == 0:
        return (w << 4) & HIGH_FOUR
    else:
        return w & HIGH_FOUR


@triton.jit
def sums_of_lines(t, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr):
    """t, whose dimension AXIS is lines, with one for each part (`split_lines`); as it is where groups end within a
    thread's run."""
    PARTS: tl.constexpr = split_lines(S, T, K)
    if sets_of(T, K) > 1:
        return t
    elif PARTS == 1:
        return tl.expand_dims(tl.sum(t, axis=AXIS), AXIS)
    else:
        return sums_of_parts(t, PARTS, AXIS)


@triton.jit
def sums_of_parts(t, PARTS: tl.constexpr, AXIS: tl.constexpr):
    """t, whose dimension AXIS is lines, with one for each of PARTS, which take turns."""
    if AXIS == 1:
        return tl.sum(tl.reshape(t, (t.shape[0], t.shape[1] // PARTS, PARTS, t.shape[2])), axis=1)
    else:
        return tl.sum(tl.reshape(t, (t.shape[0] // PARTS, PARTS, t.shape[1], t.shape[2])), axis=0)


@triton.jit
def for_lines(beside, T: tl.constexpr, K: tl.constexpr):
    """Scales or zero points of `load_beside` as float32, for what `sums_of_lines` leaves."""
    v = beside.to(tl.float32, bitcast=True)
    SETS: tl.constexpr = sets_of(T, K)
    LINES: tl.constexpr = shape_of(T, K)[0]
    if SETS == 1:
        return v
    elif LINES_AXIS == 1:
        each = tl.expand_dims(v, 2)
        each = tl.broadcast_to(each, (v.shape[0], SETS, LINES // SETS, v.shape[2]))
        return tl.reshape(each, (v.shape[0], LINES, v.shape[2]))
    else:
        each = tl.expand_dims(v, 1)
        each = tl.broadcast_to(each, (SETS, LINES // SETS, v.shape[1], v.shape[2]))
        return tl.reshape(each, (LINES, v.shape[1], v.shape[2]))


@triton.jit
def sums_of_codes(tile, xs, S: tl.constexpr, T: tl.constexpr, K: tl.constexpr):
    """A tile K times operands `parts_of`, and what that is to be multiplied by: of each row and thread, for each of
    its parts (`split_lines`) or of the lines."""
    w = tile[0]
    PACK: tl.constexpr = T.pack
    ROWS: tl.constexpr = T.tile_rows
    FOURS: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // 4, 4)
    scale = for_lines(tile[1], T, K)
    if T.codes.is_e4m3 and converts_e4m3(S):
        codes = halves_of_e4m3(w, S)
        products = tl.zeros_like(w)
        for i in tl.static_range(PACK):
            products = multiply_halves(codes[i], for_rows(xs[i], ROWS), products, S)
        total = sum_of_halves(tl.reshape(products, FOURS), S)
        unit = for_rows(xs[PACK], ROWS).to(tl.float32, bitcast=True)
        return sums_of_lines(total, S, T, K, LINES_AXIS), scale * unit
    elif T.codes.is_e4m3:
        EIGHTS: tl.constexpr = (w.shape[0], w.shape[1], w.shape[2] // 4, 8)
        total = tl.zeros((w.shape[0], w.shape[1], w.shape[2] // 4), tl.float32)
        values = e4m3_values(w)
        for i in tl.static_range(PACK):
            x = for_rows(xs[i], ROWS)
            both = tl.join(values[2 * i] * f16_low(x), values[2 * i + 1] * f16_high(x))
            total += tl.sum(tl.reshape(both, EIGHTS), axis=3)
        return sums_of_lines(total, S, T, K, LINES_AXIS), scale
    else:
        sum_h, sum_l = tl.zeros_like(w), tl.zeros_like(w)
        for half in tl.static_range(PACK // 2):
            codes = codes_in(w, half, S, T)
            sum_h = dot4(codes, for_rows(xs[2 * half], ROWS), sum_h, S)
            sum_l = dot4(codes, for_rows(xs[2 * half + 1], ROWS), sum_l, S)
        sum_h = sums_of_lines(tl.sum(tl.reshape(sum_h, FOURS), axis=3), S, T, K, LINES_AXIS)
        sum_l = sums_of_lines(tl.sum(tl.reshape(sum_l, FOURS), axis=3), S, T, K, LINES_AXIS)
        total = ((sum_h << 8) + sum_l).to(tl.float32)
        unit = for_rows(xs[PACK], ROWS).to(tl.float32, bitcast=True)
        if T.codes.zero_points:
            of_operands = for_rows(xs[PACK + 1], ROWS).to(tl.float32, bitcast=True)
            points = tl.broadcast_to(for_lines(tile[2], T, K), total.shape)
            total = tl.fma(-points, tl.broadcast_to(of_operands, total.shape), total)
        return total, scale * unit
