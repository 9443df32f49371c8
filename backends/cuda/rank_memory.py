"""The memory of all ranks: what each has of its own, what they share, and how each finds the others' words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kog_triton.backends import WeightSource
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.protocol import Pointers, RankPointers
from kog_triton.backends.cuda.memory import Memory, allocate


@dataclass(frozen=True)
class Ranks:
    """A Memory a rank, of which `first` tells the host. One GPU is one rank."""

    each: tuple[Memory, ...]

    @property
    def first(self) -> Memory:
        return self.each[0]

    def write_request(self, slot: int, words: np.ndarray, prompt: Sequence[int], start: int) -> None:
        """As `Memory.write_request`, for every rank."""
        for memory in self.each:
            memory.write_request(slot, words, prompt, start)

    def take_back(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """As `Memory.recount`; and every rank stands where the first one does, which has told the host: a step that
        did not end may have been one rank's last and not another's."""
        for memory in self.each:
            memory.recount(slot, prompt, output)
            if memory is not self.first:
                memory.states[slot].copy_(self.first.states[slot])

    def arguments(self, slots: Sequence[int], limit: int, most_steps: int, **others: torch.Tensor) -> list[Pointers]:
        """Of a launch of all ranks (`Memory.pointers`)."""
        if len(self.each) == 1:
            return [self.first.pointers(slots, limit, most_steps, **others)]
        ranks = range(len(self.each))
        return [rank_pointers(self.each, r, slots, limit, most_steps, **others) for r in ranks]

    def apart(self) -> "Ranks":
        """As `Memory.apart`."""
        return _sharing([memory.apart() for memory in self.each])

    def changed(self, change: Callable[[int], dict[str, Any]]) -> "Ranks":
        """With other tensors of some names, which `change` gives for a rank."""
        return Ranks(tuple(replace(memory, **change(rank)) for rank, memory in enumerate(self.each)))


def allocate_ranks(layout: Layout, weights: WeightSource, num_slots: int, devices: Sequence[torch.device]) -> Ranks:
    """One Memory a device."""
    return _sharing([allocate(layout, weights, num_slots, d, r) for r, d in enumerate(devices)])


def _sharing(ranks: Sequence[Memory]) -> Ranks:
    """What the host writes into while a kernel runs, and what one rank's blocks tell it about a token, is the first
    one's: pinned memory, which all GPUs see."""
    first = ranks[0]
    shared = {"masks": first.masks, "logprobs": first.logprobs}
    return Ranks((first, *(replace(memory, **shared) for memory in ranks[1:])))


def rank_pointers(
    ranks: Sequence[Memory], rank: int, slots: Sequence[int], limit: int, most_steps: int, **others: torch.Tensor
) -> RankPointers:
    """The argument of one rank's launch (`Memory.pointers`)."""
    own = ranks[rank].pointers(slots, limit, most_steps, **others)
    out = RankPointers(*(getattr(own, name) for name, *_ in Pointers._fields_), rank=rank)
    for i, other in enumerate(ranks):
        out.peers[i], out.errors[i] = other.words.data_ptr(), other.error.data_ptr()
    return out
