"""Codes of 4 and 8 bits in and out of 32-bit words, low bits first, on a little-endian machine, as safetensors asks."""

import torch

Tensor = torch.Tensor


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] as uint8 [..., n * 32 / bits]: word by word, the lowest bits first."""
    data = words.contiguous().view(torch.uint8)
    return unpack_nibbles(data) if bits == 4 else data


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] as int32 [..., ceil(n * bits / 32)], the last word filled with zeros."""
    if missing := -codes.shape[-1] % (32 // bits):
        codes = torch.nn.functional.pad(codes, (0, missing))
    data = codes[..., ::2] | codes[..., 1::2] << 4 if bits == 4 else codes
    return data.contiguous().view(torch.int32)


def unpack_nibbles(data: Tensor) -> Tensor:
    """uint8 [..., n] as uint8 [..., 2 n]: the low four bits first."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)
