"""Numbers of the host into tensors of the GPU by one launch, which reads them in pinned memory (kog_place in
short_pass.cu): an upload takes the host 50 us and lets go of Python's lock (benchmarks/cuda-log.md#short-prompts)."""

from collections.abc import Sequence

import numpy as np
import torch

from kog_triton.backends.cuda.layout.short_pass import (
    PLACE_BLOCKS,
    PLACE_HEAD,
    PLACE_THREADS,
    SHORT_KERNELS,
    PlaceCall,
    Ready,
    piece_type,
)

STAGED = 1 << 15  # words: eight requests of 256 tokens have 4,000


class Staging:
    """`ready` makes a launch ready for a device."""

    def __init__(self, ready: Ready, device: torch.device) -> None:
        self._held = torch.zeros(STAGED, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._words = self._held.numpy()
        call = PlaceCall(self._held.data_ptr())
        self._queue = ready(SHORT_KERNELS[0], "kog_place", PLACE_BLOCKS, PLACE_THREADS, call)

    def put(self, pieces: Sequence[tuple[int, np.ndarray]], stream: int) -> bool:
        """Copy int32 values to addresses, in the order of a stream; False, and nothing is queued, if they are too many.
        The caller waits until the launch before has read what it brought."""
        counts = np.array([values.size for _, values in pieces])
        first = PLACE_HEAD + len(pieces) * piece_type.itemsize // 4
        ends = first + counts.cumsum()
        if ends[-1] > STAGED:
            return False
        table = self._words[PLACE_HEAD:first].view(piece_type)
        table["to"] = [address for address, _ in pieces]
        table["from"], table["count"] = ends - counts, counts
        self._words[0] = len(pieces)
        np.concatenate([values for _, values in pieces], out=self._words[first : ends[-1]])
        self._queue(stream)
        return True
