"""Weights in pieces by turns. A GPU's marks are fakes here: what a piece holds arrives only when it is waited for."""

from contextlib import nullcontext

import pytest
import torch

from kog_triton.backends.mapped_files import MappedFiles
from kog_triton.backends.weight_upload import Piece, WeightUpload, as_bytes, copy_in_pieces


class LateTarget:
    """Bytes of a GPU that are there when a mark behind them is waited for, and not before."""

    def __init__(self, count):
        self.bytes = torch.zeros(count, dtype=torch.uint8)
        self.on_their_way, self.waits = [], 0

    def __getitem__(self, where):
        target = self

        class Part:
            def copy_(self, held, non_blocking):
                assert non_blocking
                target.on_their_way.append((where, held))  # the memory itself: what it holds when it is read

        return Part()

    def mark(self):
        marked = len(self.on_their_way)

        def wait():
            self.waits += 1
            for where, held in self.on_their_way[:marked]:
                if held is not None:
                    self.bytes[where] = held
            self.on_their_way[:marked] = [(None, None)] * marked

        return wait


@pytest.mark.parametrize("count", [1, 7, 8, 9, 24, 25, 100])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_a_piece_is_filled_again_only_when_it_has_arrived(count, pieces):
    source, to = torch.arange(count).to(torch.uint8), LateTarget(count)
    ring = [Piece(torch.empty(8, dtype=torch.uint8), to.mark, MappedFiles()) for _ in range(pieces)]
    copy_in_pieces(source, to, ring)
    assert to.waits == max(0, -(-count // 8) - pieces)  # the last ones are still on their way
    for piece in ring:
        piece.wait()
    assert torch.equal(to.bytes, source)


def test_the_bytes_are_those_of_the_tensor():
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        tensor = torch.randn(3, 5).to(dtype)
        assert bytes(as_bytes(tensor).tolist()) == tensor.view(torch.uint8).numpy().tobytes()
    assert as_bytes(torch.zeros(())).shape == (4,)


def test_on_a_cpu_a_weight_stays_where_it_is():
    weight = torch.zeros(1 << 20)
    with WeightUpload(torch.device("cpu")) as bring:
        assert bring(weight) is weight


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_files_and_threads_are_closed_with_the_upload(monkeypatch, error):
    closed = []
    monkeypatch.setattr(MappedFiles, "close", lambda files: closed.append(files))
    with pytest.raises(error) if error else nullcontext(), WeightUpload(torch.device("cpu")):
        assert not closed
        if error:
            raise error
    assert len(closed) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 1 << 19, (40 << 20) + 3])
def test_a_gpu_gets_the_same_weights(count):
    device = torch.device("cuda")
    weights = [torch.randint(-9, 9, (2, count), dtype=torch.int16) for _ in range(3)]
    weights.append(weights[0].T)  # not contiguous
    with WeightUpload(device) as bring:
        found = [bring(weight) for weight in weights]
    assert all(torch.equal(ours.cpu(), weight) for ours, weight in zip(found, weights, strict=True))
