"""Weights of the host into the memory of a GPU, in pieces of pinned memory by turns.

A copy out of pageable memory, such as a mapped file, is made by one thread: it faults a file's pages in and copies them
to pinned memory of the driver's, and the GPU waits. Here all threads of torch fill one piece while the GPU takes the
last one.
"""

from collections.abc import Callable, Sequence

import torch

Tensor = torch.Tensor
# None of the three is measured. torch keeps the pieces pinned until a graph is captured.
PIECE_BYTES, NUM_PIECES = 16 << 20, 2
LEAST_BYTES = 1 << 20  # of a tensor that goes in pieces


def nothing() -> None:
    pass


class Piece:
    """Memory of the host, which `mark` says is being read by the GPU: it gives what waits for the end of that."""

    def __init__(self, memory: Tensor, mark: Callable[[], Callable[[], object]]) -> None:
        self._memory, self._mark = memory, mark
        self.wait: Callable[[], object] = nothing  # until the GPU has read what was brought last

    @property
    def size(self) -> int:
        return len(self._memory)

    def bring(self, source: Tensor, to: Tensor) -> None:
        """Bytes of the host to the GPU, in the order of the current stream."""
        self.wait()
        held = self._memory[: len(source)]
        held.copy_(source)
        to.copy_(held, non_blocking=True)
        self.wait = self._mark()


class WeightUpload:
    """Call it with a tensor for that tensor on `device`, in the order of the current stream. As a context manager it
    lets go of the pinned memory, once what was brought is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[Piece] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._device.type != "cuda" or tensor.device.type != "cpu":
            return tensor.to(self._device)
        if tensor.nbytes < LEAST_BYTES:
            return tensor.to(self._device)
        if not self._pieces:
            self._pieces = [
                Piece(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), self._mark)
                for _ in range(NUM_PIECES)
            ]
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        copy_in_pieces(as_bytes(tensor.contiguous()), as_bytes(out), self._pieces)
        return out

    def __enter__(self) -> "WeightUpload":
        return self

    def __exit__(self, *_: object) -> None:
        for piece in self._pieces:
            piece.wait()
        self._pieces = []

    def _mark(self) -> Callable[[], object]:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def copy_in_pieces(source: Tensor, to: Tensor, pieces: Sequence[Piece]) -> None:
    """Bytes to as many bytes elsewhere, by pieces of one size in turn."""
    size = pieces[0].size
    for number, at in enumerate(range(0, len(source), size)):
        pieces[number % len(pieces)].bring(source[at : at + size], to[at : at + size])
