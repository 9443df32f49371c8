"""Codes of 4 and 8 bits out of 32-bit words, low bits first."""

import torch

Tensor = torch.Tensor


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] as uint8 [..., n * 32 / bits]: word by word, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    parts = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return parts.to(torch.uint8).flatten(-2)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] as int32 [..., ceil(n * bits / 32)], the last word filled with zeros."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_word))
    parts = padded.unflatten(-1, (-1, per_word)).to(torch.int64)
    words = (parts << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_nibbles(data: Tensor) -> Tensor:
    """uint8 [..., n] as uint8 [..., 2 n]: the low four bits first."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)
