"""The weakest memory a GPU may show its blocks: one cache a block, incoherent until told otherwise.

    plain load     what the block's cache holds, however old; a line is fetched when it is missing
    plain store    stays in the cache until a release, or until the line happens to be evicted
    .cv load       what memory holds, but for what the block itself stored
    .wt store      on its way to memory: each value lands by chance when another block's .cv load asks for its line,
                   and for certain once the block has gone on by RECENT accesses. So words that are polled come late
                   and in any order, and what nobody polls comes as a plain store does
    atomics        act on memory itself
    release        writes the block's dirty bytes back        acquire    forgets its clean lines

Lines are 64 bytes, dirty by byte, so that two blocks may own halves of a line.
"""

import ctypes
import random

import numpy as np

LINE = 64
# How late a polled word may come. A block has gone on by more between two words that flip one phase: where nobody waits
# for the first, as for a split that is not in use, who waits for the second would take what stood there before both.
RECENT = 4


def memory(address: int, num_bytes: int) -> np.ndarray:
    """The bytes at an address of this process, uint8, writable."""
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(int(address)), np.uint8)


def lines_of(addresses: np.ndarray) -> set[int]:
    return set((addresses.ravel() // LINE).tolist())


class Line:
    """64 bytes as one block sees them."""

    def __init__(self, number: int) -> None:
        self.home = memory(number * LINE, LINE)
        self.bytes = self.home.copy()
        self.dirty = np.zeros(LINE, bool)
        self.on_way: dict[tuple[int, int], int] = {}  # from, to: when the block stored there

    def write_back(self) -> None:
        self.home[self.dirty] = self.bytes[self.dirty]
        self.dirty[:] = False
        self.on_way = {}

    def land(self, rng: random.Random, now: int) -> None:
        """Some of what is on its way, and all that is not recent."""
        for (first, last), when in list(self.on_way.items()):
            if now - when > RECENT or rng.random() < 0.5:
                self.home[first:last] = self.bytes[first:last]
                self.dirty[first:last] = False
                del self.on_way[first, last]

    def refresh(self) -> None:
        self.bytes[~self.dirty] = self.home[~self.dirty]


class Cache:
    """One block's view of memory; `eviction` is the chance that an access pushes a line out."""

    def __init__(self, rng: random.Random, eviction: float) -> None:
        self._rng, self._eviction = rng, eviction
        self._lines: dict[int, Line] = {}
        self._on_way: set[int] = set()  # lines of which something is
        self.accesses = 0  # of the block, so far

    def load(self, addresses: np.ndarray, size: int, evict: bool = True) -> np.ndarray:
        """Bytes [n, size] of n elements, none of which straddles a line."""
        if evict:
            self._evict()
        numbers, which = np.unique(addresses // LINE, return_inverse=True)
        lines = np.stack([self._line(int(n)).bytes for n in numbers])
        return lines[which.reshape(-1, 1), (addresses % LINE)[:, None] + np.arange(size)]

    def store(self, addresses: np.ndarray, values: np.ndarray, through: bool) -> None:
        """Values [n, size] of bytes; `through` the cache, or into it alone."""
        self._evict()
        for address, value in zip(addresses.tolist(), values, strict=True):
            number, first = address // LINE, address % LINE
            line, last = self._line(number), first + len(value)
            if (first, last) in line.on_way:  # long since
                line.home[first:last] = line.bytes[first:last]
            line.bytes[first:last] = value
            line.dirty[first:last] = True
            if through:
                line.on_way[first, last] = self.accesses
                self._on_way.add(number)

    def bypass(self, numbers: set[int]) -> None:
        """Let go of these lines: the next access is memory's."""
        for number in numbers & self._lines.keys():
            self._drop(number)

    def refresh(self, numbers: set[int]) -> bool:
        """These lines as memory has them, but for the block's own stores; whether there are any of those."""
        own = False
        for number in numbers & self._lines.keys():
            if self._lines[number].dirty.any():
                self._lines[number].refresh()
                own = True
            else:
                del self._lines[number]
        return own

    def land(self, numbers: set[int]) -> bool:
        """Another block asks memory for these lines; whether anything was on its way there."""
        asked = numbers & self._on_way
        for number in asked:
            self._lines[number].land(self._rng, self.accesses)
            if not self._lines[number].on_way:
                self._on_way.discard(number)
        return bool(asked)

    def release(self) -> None:
        for line in self._lines.values():
            line.write_back()
        self._on_way.clear()

    def acquire(self) -> None:
        self._lines = {n: line for n, line in self._lines.items() if line.dirty.any()}
        for line in self._lines.values():
            line.refresh()

    def _line(self, number: int) -> Line:
        if number not in self._lines:
            self._lines[number] = Line(number)
        return self._lines[number]

    def _evict(self) -> None:
        if self._lines and self._rng.random() < self._eviction:
            self._drop(self._rng.choice(list(self._lines)))

    def _drop(self, number: int) -> None:
        self._lines.pop(number).write_back()
        self._on_way.discard(number)
