"""Weights of the host into the memory of a GPU, in pieces of pinned memory by turns.

A copy out of pageable memory, such as a mapped file, is made by one thread: it faults a file's pages in and copies them
to pinned memory of the driver's, and the GPU waits. Here several threads fill one piece (mapped_files.py) while the GPU
takes the last one.
"""

from collections.abc import Callable, Sequence

import torch

from kog_triton.backends.mapped_files import MappedFiles

Tensor = torch.Tensor
# None of the three is measured. torch keeps the pieces pinned until a graph is captured.
PIECE_BYTES, NUM_PIECES = 16 << 20, 2
LEAST_BYTES = 1 << 20  # of a tensor that goes in pieces


def nothing() -> None:
    pass


class Piece:
    """Memory of the host, which `mark` says is being read by the GPU: it gives what waits for the end of that."""

    def __init__(self, memory: Tensor, mark: Callable[[], Callable[[], object]], files: MappedFiles) -> None:
        self._memory, self._mark, self._files = memory, mark, files
        self.wait: Callable[[], object] = nothing  # until the GPU has read what was brought last

    @property
    def size(self) -> int:
        return len(self._memory)

    def bring(self, source: Tensor, to: Tensor) -> None:
        """Bytes of the host to the GPU, in the order of the current stream."""
        self.wait()
        held = self._memory[: len(source)]
        self._files.copy(source, held)
        to.copy_(held, non_blocking=True)
        self.wait = self._mark()


class WeightUpload:
    """Call it with a tensor for that tensor on `device`, in the order of the current stream; ModelError if its file
    cannot be read. As a context manager it ends its threads, closes what it opened, and lets go of the pinned memory,
    once what was brought is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[Piece] = []
        self._files = MappedFiles()

    def __call__(self, tensor: Tensor) -> Tensor:
        if self._device.type != "cuda" or tensor.device.type != "cpu":
            return tensor.to(self._device)
        if tensor.nbytes < LEAST_BYTES:
            return tensor.to(self._device)
        if not self._pieces:
            self._pieces = [
                Piece(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True), self._mark, self._files)
                for _ in range(NUM_PIECES)
            ]
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        copy_in_pieces(as_bytes(tensor.contiguous()), as_bytes(out), self._pieces)
        return out

    def __enter__(self) -> "WeightUpload":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()
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
