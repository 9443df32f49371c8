"""Philox4x32-10: random words as a pure function of a counter and a key.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A draw has no
state, so any backend, rank or block computes any token's word on its own and in any order.
"""

import numpy as np

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # what each round adds to the key
ROUNDS = 10
WORD = 0xFFFFFFFF
CHUNK = 2048  # counters run at a time: the arrays stay in the CPU's cache

# row 0 is the product that word 2 enters, row 1 the one that word 0 enters
_MULTIPLIERS = np.array([[MULTIPLIERS[1]], [MULTIPLIERS[0]]], np.uint64)


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds on uint32 [4, n] counters under one key of two 32-bit words: uint32 [4, n]."""
    even = counter[[2, 0]].astype(np.uint64)
    odd = counter[[1, 3]].astype(np.uint64)
    for i in range(ROUNDS):
        round_key = np.array([[(key[0] + i * WEYL[0]) & WORD], [(key[1] + i * WEYL[1]) & WORD]], np.uint64)
        product = even * _MULTIPLIERS
        # new word 0 = hi(M1 c2) ^ c1 ^ k0, 1 = lo(M1 c2), 2 = hi(M0 c0) ^ c3 ^ k1, 3 = lo(M0 c0)
        even = ((product >> np.uint64(32)) ^ odd ^ round_key)[::-1]
        odd = product & np.uint64(WORD)
    return np.stack([even[1], odd[0], even[0], odd[1]]).astype(np.uint32)


def random_words(ids: np.ndarray, position: int | np.ndarray, sample_idx: int, seed: int) -> np.ndarray:
    """The 32-bit word of each (id, position), which broadcast: uint32 of their joint shape.

    counter = (id >> 2, position, sample_idx, 0), key = (seed low, seed high), word id & 3.
    """
    ids, positions = np.broadcast_arrays(ids, position)
    counter = np.zeros((4, ids.size), np.uint32)
    counter[0] = ids.ravel() >> 2
    counter[1] = positions.ravel()
    counter[2] = sample_idx
    words = philox4x32(counter, (seed & WORD, seed >> 32))
    return words[ids.ravel() & 3, np.arange(ids.size)].reshape(ids.shape)


def vocab_words(vocab_size: int, position: int, sample_idx: int, seed: int) -> np.ndarray:
    """`random_words` of ids 0 .. vocab_size - 1, each counter run once: uint32 [vocab_size]."""
    num_counters = -(-vocab_size // 4)
    out = np.empty((num_counters, 4), np.uint32)
    for first in range(0, num_counters, CHUNK):
        last = min(first + CHUNK, num_counters)
        counter = np.zeros((4, last - first), np.uint32)
        counter[0] = np.arange(first, last)
        counter[1] = position
        counter[2] = sample_idx
        out[first:last] = philox4x32(counter, (seed & WORD, seed >> 32)).T
    return out.ravel()[:vocab_size]
