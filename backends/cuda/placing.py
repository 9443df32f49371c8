"""Requests on their way into their slots: all that were admitted since the last launch go by one upload and a launch
(kog_place in short_pass.cu). Three uploads each took the host longer than the GPU a pass of eight prompts
(benchmarks/cuda-log.md#short-prompts)."""

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
STAGED_BYTES = 4 * STAGED


class Placing:
    """Of one model's slots on one GPU; `ready` makes a launch ready."""

    def __init__(self, memory: Memory, ready: Ready) -> None:
        self._memory = memory
        self._staged = torch.zeros(STAGED, dtype=torch.int32, device=memory.request.device)
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
        self._waiting[slot] = self._memory.pieces_of(slot, words, prompt, start)

    def place(self, stream: int) -> None:
        """All that were added, in the order of a stream, the current one."""
        pieces = [piece for each in self._waiting.values() for piece in each]
        self._waiting.clear()
        if not pieces:
            return
        counts = np.array([values.size for _, values in pieces])
        ends = PLACE_HEAD + len(pieces) * piece_type.itemsize // 4 + counts.cumsum()
        if ends[-1] > STAGED:
            for to, values in pieces:
                upload(torch.from_numpy(values), to)
            return
        table = np.zeros(len(pieces), piece_type)
        table["to"] = [to.data_ptr() for to, _ in pieces]
        table["from"], table["count"] = ends - counts, counts
        head = np.zeros(PLACE_HEAD, np.int32)
        head[0] = len(pieces)
        words = np.concatenate([head, table.view(np.int32), *(values for _, values in pieces)])
        upload(torch.from_numpy(words), self._staged[: len(words)])
        self._queue(stream)

    @property
    def nbytes(self) -> int:
        return self._staged.nbytes
