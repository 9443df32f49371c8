"""A token's row of the embedding: pairs of 16-bit values, or a narrow checkpoint's codes (schedule/embedding.py)."""

import triton
import triton.language as tl

from kog_triton.backends.triton.kernel.codes import E2M1_BITS, E2M1_UNIT, E4M3_BITS, E4M3_UNIT
from kog_triton.backends.triton.kernel.matvec import rounded_product
from kog_triton.backends.triton.kernel.words import half_bits, high, low, plane_index, plane_tiles
from kog_triton.model.weight_format import Code, Offset

E4M3: tl.constexpr = tl.constexpr(int(Code.E4M3))
INT8: tl.constexpr = tl.constexpr(int(Code.INT8))
E2M1: tl.constexpr = tl.constexpr(int(Code.E2M1))
NO_OFFSET: tl.constexpr = tl.constexpr(int(Offset.NONE))
ZERO_POINT: tl.constexpr = tl.constexpr(int(Offset.ZERO_POINT))
MINIMUM: tl.constexpr = tl.constexpr(int(Offset.MINIMUM))


@triton.jit
def load_embedding(token, p, S: tl.constexpr):
    HALF: tl.constexpr = S.hidden_size // 2
    x = ()
    for c in tl.static_range(plane_tiles(S)):
        j = plane_index(c, S)
        if S.has_narrow_embedding:
            x = x + (embedded(token, 2 * j, p, S), embedded(token, 2 * j + 1, p, S))
        else:
            w = tl.load(p.embed + token.to(tl.int64) * HALF + j, mask=j < HALF, other=0)
            x = x + (low(w, S), high(w, S))
    return x


@triton.jit
def embedded(token, i, p, S: tl.constexpr):
    """Values i of a token's row, of a narrow embedding rounded to the model's type; zeros behind its end."""
    inside = i < S.hidden_size
    if S.has_narrow_embedding:
        value = unpacked(token, i, inside, p, S)
    else:
        row = p.half_embed + token.to(tl.int64) * S.hidden_size
        value = tl.load(row + i, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def unpacked(token, i, inside, p, S: tl.constexpr):
    R: tl.constexpr = S.embedding
    BITS: tl.constexpr = R.format.code.bits
    row = p.embed + token.to(tl.int64) * (R.bytes // 4)
    numbers = row + R.code_bytes // 4 + i // R.group
    word = tl.load(row + i // (32 // BITS), mask=inside, other=0)
    value = value_of(word << (32 - BITS - i % (32 // BITS) * BITS), R)
    scale = tl.load(numbers, mask=inside, other=0).to(tl.float32, bitcast=True)
    offset = tl.zeros_like(scale)
    if R.format.offset != NO_OFFSET:
        offset = tl.load(numbers + R.groups, mask=inside, other=0).to(tl.float32, bitcast=True)
    if R.format.offset == ZERO_POINT:
        value -= offset
    value = rounded_product(value - R.zero, scale)
    if R.format.offset == MINIMUM:
        value += offset
    return low(half_bits(value, S, False), S)


@triton.jit
def value_of(first, R: tl.constexpr):
    """What the code in the highest bits of each word stands for, float32; of UINT4 the code."""
    if R.format.code == E4M3:
        return ((first >> 4) & E4M3_BITS).to(tl.float32, bitcast=True) * E4M3_UNIT
    elif R.format.code == E2M1:
        return ((first >> 6) & E2M1_BITS).to(tl.float32, bitcast=True) * E2M1_UNIT
    elif R.format.code == INT8:
        return (first >> 24).to(tl.float32)
    else:
        return ((first >> 28) & 15).to(tl.float32)
