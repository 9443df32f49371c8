"""The memory of several ranks: what each has of its own, what they share, and how each finds the others' words."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kog_triton.backends import WeightSource
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.protocol import Pointers, RankPointers
from kog_triton.backends.cuda.memory import Memory, allocate


def allocate_ranks(
    layout: Layout, weights: WeightSource, num_slots: int, devices: Sequence[torch.device]
) -> list[Memory]:
    """One Memory a device. What the host writes into while a kernel runs, and what one rank's blocks tell it about
    a token, is the first one's: pinned memory, which all GPUs see."""
    ranks = [allocate(layout, weights, num_slots, d, rank) for rank, d in enumerate(devices)]
    first = ranks[0]
    return [first, *(replace(m, masks=first.masks, logprobs=first.logprobs) for m in ranks[1:])]


def rank_pointers(
    ranks: Sequence[Memory],
    rank: int,
    slots: Sequence[int],
    limit: int,
    most_steps: int,
    **others: torch.Tensor,
) -> RankPointers:
    """The argument of one rank's launch (`Memory.pointers`)."""
    own = ranks[rank].pointers(slots, limit, most_steps, **others)
    out = RankPointers(*(getattr(own, name) for name, *_ in Pointers._fields_), rank=rank)
    for i, other in enumerate(ranks):
        out.peers[i], out.errors[i] = other.words.data_ptr(), other.error.data_ptr()
    return out
