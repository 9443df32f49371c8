"""Logits, parameters and masks for tests of sampling."""

import numpy as np

from kog_triton.sampling import SamplingParams

VOCAB = 37


def make_logits(seed: int, vocab: int = VOCAB, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=vocab) * spread).astype(np.float32)


def params_of(vocab: int = VOCAB, **fields) -> SamplingParams:
    return SamplingParams(**{"seed": 1234, **fields}).resolve(vocab)


def bitmask(allowed: list[int], vocab: int = VOCAB) -> np.ndarray:
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in allowed:
        words[token >> 5] |= np.uint32(1 << (token & 31))
    return words
