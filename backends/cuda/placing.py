"""Requests on their way into their slots: all that were admitted since the last launch go there by one of their own.

Three uploads each took the host longer than the GPU a pass of eight prompts (benchmarks/cuda-log.md#short-prompts).
"""

from collections.abc import Sequence

import numpy as np
import torch

from kog_triton.backends.cuda.layout.short_pass import Ready
from kog_triton.backends.cuda.memory import Memory
from kog_triton.backends.cuda.staging import Staging
from kog_triton.backends.prefill.upload import upload


class Placing:
    """Of one model's slots on one GPU; `ready` makes a launch ready."""

    def __init__(self, memory: Memory, ready: Ready) -> None:
        self._memory, self._staging = memory, Staging(ready, memory.request.device)
        self._waiting: dict[int, list[tuple[torch.Tensor, np.ndarray]]] = {}  # by slot

    def add(self, slot: int, words: np.ndarray, prompt: Sequence[int], start: int) -> None:
        """As `Memory.write_request`, by the next `place`. What the host shares with the kernel is there at once."""
        self._memory.clear_told(slot, words)
        self._waiting[slot] = self._memory.pieces_of(words, prompt, start)

    def place(self, stream: int) -> None:
        """All that were added, in the order of a stream, the current one. Not again before the launch behind it has
        ended, which has then read all of it."""
        pieces = [(slot, *piece) for slot, each in self._waiting.items() for piece in each]
        self._waiting.clear()
        if not pieces:
            return
        placed = [(r.data_ptr() + 4 * slot * r.stride(0), values) for slot, r, values in pieces]
        if not self._staging.put(placed, stream):
            for slot, rows, values in pieces:
                upload(torch.from_numpy(values), rows[slot, : values.size])
