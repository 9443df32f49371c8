"""Words that carry their own readiness: 32 bits, of which bit 0 is a phase that flips at every rewrite.

A reader that finds the phase it waits for has the value too: no flag, no reset, no fence (docs/SYNC.md). The price is
one bit of the value: of a float32 (F32), or of the first of two 16-bit values (PAIR).

    F32          value[31:1] phase              truncated: 2^-23 relative
    PAIR, fp16   second[31:16] first[15:1] phase    first is rounded to nearest, ties to even, on 15 bits
    PAIR, bf16   second[31:16] first[15:0], both times 2^64, then rotated right by 14 bits

The rotation brings the top bit of first's exponent to bit 0. That bit is one from 2^-63 on: it can give way to the
phase, and no mantissa is touched. A smaller first, zero too, counts as 2^-63 of its sign. Readers may multiply by
values that still carry the factor: a power of two changes no rounding.

Fine pairs carry what a bf16 model computes as PAIR, fp16, times FINE_SCALE: ten bits of mantissa (nine where the phase
is) for seven. Up to 2^20 fits; what is larger is a NaN in the kernel. What is below 2^-10 is off by 2^-19 at most:
bf16 would be nearer to what is below 2^-11. They are
- what a module gives to x, which is a sum of dozens of them in float32: seven bits would cost it as much as all that is
  rounded on the way;
- what meets narrow weights where tokens are decoded, and the queries, keys and values that such weights made
  (benchmarks/triton-log.md#fine-pairs).

A NaN stays a NaN. What is too large, from 2^64 on in bf16, becomes an infinity, which the logits show.
"""

import numpy as np

from kog_triton.model.spec import DType

Array = np.ndarray
NAN = {DType.BF16: 0x7FC0, DType.F16: 0x7E00}  # quiet NaNs whose low bit is free
LEAST_NAN_PAYLOAD = 0x7FC00000
SCALE = {DType.BF16: 2.0**64, DType.F16: 1.0}  # of both values of a pair
FINE_SCALE = 2.0**-4  # of fine pairs
PAIR_ROTATION = 14  # of a pair in bf16: what brings the top bit of first's exponent to bit 0
EXPONENT_TOP = 1 << PAIR_ROTATION


def pack_f32(values: Array, phase: int) -> Array:
    """float32 [n] to words uint32 [n]."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = np.where(np.isnan(values), np.uint32(LEAST_NAN_PAYLOAD), bits)
    return (bits & np.uint32(0xFFFFFFFE)) | np.uint32(phase)


def unpack_f32(words: Array) -> Array:
    return (words & np.uint32(0xFFFFFFFE)).view(np.float32)


def pack_pair(values: Array, phase: int, dtype: DType) -> Array:
    """float32 [2 n] to words uint32 [n]."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = to_half(values * np.float32(SCALE[dtype]), dtype).astype(np.uint32)
    first, second = bits[0::2], bits[1::2]
    if dtype is DType.BF16:
        first = np.where(first & EXPONENT_TOP, first, first & 0x8000)
        words = _rotated_right(second << 16 | first, PAIR_ROTATION)
    else:
        nan = np.isnan(values[0::2])
        first = np.where(nan, np.uint32(NAN[dtype]), first + ((first >> 1) & 1))
        words = second << 16 | first & 0xFFFF
    return (words & np.uint32(0xFFFFFFFE)) | np.uint32(phase)


def unpack_pair(words: Array, dtype: DType) -> Array:
    """Words uint32 [n] to float32 [2 n]."""
    if dtype is DType.BF16:
        both = _rotated_right(words, 32 - PAIR_ROTATION) | np.uint32(EXPONENT_TOP)
    else:
        both = words & np.uint32(0xFFFFFFFE)
    halves = np.stack([both & 0xFFFF, both >> 16], 1).ravel().astype(np.uint16)
    return from_half(halves, dtype) / np.float32(SCALE[dtype])


def pack_fine(values: Array, phase: int) -> Array:
    """float32 [2 n] to fine pairs, words uint32 [n]."""
    return pack_pair(values * np.float32(FINE_SCALE), phase, DType.F16)


def unpack_fine(words: Array) -> Array:
    """Fine pairs, words uint32 [n], to float32 [2 n]."""
    return unpack_pair(words, DType.F16) / np.float32(FINE_SCALE)


def _rotated_right(words: Array, by: int) -> Array:
    return words >> np.uint32(by) | words << np.uint32(32 - by)


def phases(words: Array) -> Array:
    return words & np.uint32(1)


def to_half(values: Array, dtype: DType) -> Array:
    """float32 to the bits of a 16-bit type, uint16, to nearest, ties to even."""
    values = values.astype(np.float32)
    if dtype is DType.F16:
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(NAN[dtype]), rounded).astype(np.uint16)


def from_half(bits: Array, dtype: DType) -> Array:
    """The bits of a 16-bit type, uint16, as float32."""
    if dtype is DType.F16:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
