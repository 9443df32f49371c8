"""Requests on their way into their slots: all that were admitted since the last launch are laid there by a launch of
their own, which reads them in the host's memory (kog_place in short_pass.cu). Three uploads each took the host longer
than the GPU a pass of eight prompts (benchmarks/cuda-log.md#short-prompts)."""

from collections.abc import Sequence

import numpy as np
import torch

from kog_triton.backends.cuda.layout.short_pass import (
    PLACE_BLOCKS,
    PLACE_HEAD,
    PLACE_THREADS,
    SHORT_KERNELS,
    PlaceCall,
    piece_type,
)
from kog_triton.backends.cuda.memory import Memory
from kog_triton.backends.cuda.short_pass import Ready
from kog_triton.backends.prefill.upload import upload

STAGED = 1 << 15  # words: eight requests of 256 tokens have 4,000; what is longer goes by itself


class Placing:
    """Of one model's slots on one GPU; `ready` makes a launch ready."""

    def __init__(self, memory: Memory, ready: Ready) -> None:
        self._memory = memory
        pinned = memory.request.device.type == "cuda"
        self._staged = torch.zeros(
            STAGED, dtype=torch.int32, pin_memory=pinned
        )  # the GPU reads it there
        self._words = self._staged.numpy()
        self._queue = ready(
            SHORT_KERNELS[0],
            "kog_place",
            PLACE_BLOCKS,
            PLACE_THREADS,
            PlaceCall(self._staged.data_ptr()),
        )
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
        counts = np.array([values.size for *_, values in pieces])
        first = PLACE_HEAD + len(pieces) * piece_type.itemsize // 4
        ends = first + counts.cumsum()
        if ends[-1] > STAGED:
            for slot, rows, values in pieces:
                upload(torch.from_numpy(values), rows[slot, : values.size])
            return
        table = self._words[PLACE_HEAD:first].view(piece_type)
        table["to"] = [rows.data_ptr() + 4 * slot * rows.stride(0) for slot, rows, _ in pieces]
        table["from"], table["count"] = ends - counts, counts
        self._words[0] = len(pieces)
        np.concatenate([values for *_, values in pieces], out=self._words[first : ends[-1]])
        self._queue(stream)
