"""Words that carry their own readiness: 32 bits, of which bit 0 is a phase that flips at every rewrite.

A reader that finds the phase it waits for has the value too: no flag, no reset, no fence. The price is the
lowest bit of the value: of a float32 (Wire.F32), or of the first of two 16-bit values (Wire.PAIR).

    F32    value[31:1] phase             truncated: 2^-23 relative
    PAIR   second[31:16] first[15:1] phase   first is rounded to nearest, ties to even, on 15 bits

A NaN stays a NaN. A 16-bit overflow becomes an infinity, which the logits show.
"""

import numpy as np

from kog_triton.model.spec import DType

Array = np.ndarray
NAN = {DType.BF16: 0x7FC0, DType.F16: 0x7E00}  # quiet NaNs whose low bit is free
LEAST_NAN_PAYLOAD = 0x7FC00000


def pack_f32(values: Array, phase: int) -> Array:
    """float32 [n] to words uint32 [n]."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = np.where(np.isnan(values), np.uint32(LEAST_NAN_PAYLOAD), bits)
    return (bits & np.uint32(0xFFFFFFFE)) | np.uint32(phase)


def unpack_f32(words: Array) -> Array:
    return (words & np.uint32(0xFFFFFFFE)).view(np.float32)


def pack_pair(values: Array, phase: int, dtype: DType) -> Array:
    """float32 [2 n] to words uint32 [n]."""
    bits = to_half(values, dtype).astype(np.uint32)
    first, second = bits[0::2], bits[1::2]
    nan = np.isnan(values[0::2])
    first = np.where(nan, np.uint32(NAN[dtype]), first + ((first >> 1) & 1) & np.uint32(0xFFFE))
    return (second << 16) | (first & np.uint32(0xFFFE)) | np.uint32(phase)


def unpack_pair(words: Array, dtype: DType) -> Array:
    """Words uint32 [n] to float32 [2 n]."""
    out = np.empty(2 * len(words), np.uint16)
    out[0::2] = words & np.uint32(0xFFFE)
    out[1::2] = words >> 16
    return from_half(out, dtype)


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
