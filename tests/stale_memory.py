"""The weakest memory a GPU may show its blocks: one cache a block, incoherent until told otherwise.

    plain load     what the block's cache holds, however old; a line is fetched when it is missing
    plain store    stays in the cache until a release, or until the line happens to be evicted
    .cv load, .wt store and atomics    act on memory itself
    release        writes the block's dirty bytes back        acquire    forgets its clean lines

Lines are 64 bytes, dirty by byte, so that two blocks may own halves of a line.
"""

import ctypes
import random

import numpy as np

LINE = 64


def memory(address: int, num_bytes: int) -> np.ndarray:
    """The bytes at an address of this process, uint8, writable."""
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(int(address)), np.uint8)


class Line:
    """64 bytes as one block sees them."""

    def __init__(self, number: int) -> None:
        self.home = memory(number * LINE, LINE)
        self.bytes = self.home.copy()
        self.dirty = np.zeros(LINE, bool)

    def write_back(self) -> None:
        self.home[self.dirty] = self.bytes[self.dirty]
        self.dirty[:] = False


class Cache:
    """One block's view of memory; `eviction` is the chance that an access pushes a line out."""

    def __init__(self, rng: random.Random, eviction: float) -> None:
        self._rng, self._eviction = rng, eviction
        self._lines: dict[int, Line] = {}

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Bytes [n, size] of n elements, none of which straddles a line."""
        self._evict()
        numbers, which = np.unique(addresses // LINE, return_inverse=True)
        lines = np.stack([self._line(int(n)).bytes for n in numbers])
        return lines[which.reshape(-1, 1), (addresses % LINE)[:, None] + np.arange(size)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Values [n, size] of bytes, into the cache alone."""
        self._evict()
        for address, value in zip(addresses.tolist(), values, strict=True):
            line, at = self._line(address // LINE), address % LINE
            line.bytes[at : at + len(value)] = value
            line.dirty[at : at + len(value)] = True

    def bypass(self, addresses: np.ndarray) -> None:
        """Let go of these lines: the next access is memory's."""
        for number in set((addresses.ravel() // LINE).tolist()):
            line = self._lines.pop(number, None)
            if line is not None:
                line.write_back()

    def release(self) -> None:
        for line in self._lines.values():
            line.write_back()

    def acquire(self) -> None:
        self._lines = {n: line for n, line in self._lines.items() if line.dirty.any()}
        for line in self._lines.values():
            line.bytes[~line.dirty] = line.home[~line.dirty]

    def _line(self, number: int) -> Line:
        if number not in self._lines:
            self._lines[number] = Line(number)
        return self._lines[number]

    def _evict(self) -> None:
        if self._lines and self._rng.random() < self._eviction:
            number = self._rng.choice(list(self._lines))
            self._lines.pop(number).write_back()
