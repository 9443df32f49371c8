"""What one process of torch_ranks.py runs: its rank's part of torch_graph.py's decoder.

rows of q, k, v, gate, up and lm_head, columns of o and down: a rank's, of equal shares
behind o and down: an all-reduce; behind lm_head: each rank's best, of which all take the best
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from kog_triton.backends import WeightSource
from kog_triton.bench.peers.torch_graph import PlainDecoder, WideLinear
from kog_triton.model.spec import ModelSpec

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_bias", "k_bias", "v_bias", "gate_bias", "up_bias")
COLUMNS, SUMMED = ("o_proj", "down_proj"), ("o_bias", "down_bias")  # a bias is added by rank 0
Tensor = torch.Tensor


def why_not(spec: ModelSpec, ranks: int) -> str:
    """Why a model has no equal shares for so many ranks; "" if it has."""
    sizes = {
        "query heads": spec.num_heads,
        "key-value heads": spec.num_kv_heads,
        "rows of the FFN": spec.intermediate_size,
        "ids": spec.vocab_size,
    }
    for name, size in sizes.items():
        if size % ranks:
            return f"its {size} {name} do not divide over {ranks} GPUs"
    return ""


class RankWeights:
    """A `WeightSource` of a rank's shares of the layers, those of the whole model's embedding and norms."""

    def __init__(self, weights: WeightSource, rank: int, ranks: int) -> None:
        spec = weights.spec
        self._weights, self._rank, self._ranks = weights, rank, ranks
        self.spec = spec.replace(
            narrow=(),
            num_heads=spec.num_heads // ranks,
            num_kv_heads=spec.num_kv_heads // ranks,
            intermediate_size=spec.intermediate_size // ranks,
        )

    def load(self, name: str) -> Tensor:
        whole, kind = self._weights.load(name), name.rpartition(".")[2]
        axis = 1 if kind in ROWS else 2 if kind in COLUMNS else None  # of [1, rows, columns]
        if name == "lm_head":
            axis = 0  # it is [vocab, hidden]
        if axis is not None:
            return whole.chunk(self._ranks, axis)[self._rank].clone()
        if kind in SUMMED and self._rank:
            return torch.zeros_like(whole)
        return whole


class Sums(Protocol):
    """How ranks add what each has; all call it in the same order."""

    def add(self, y: Tensor) -> Tensor:
        """The sum of all ranks' y; may be y itself."""
        ...

    def each(self, mine: Tensor) -> Tensor:
        """[ranks, n] of every rank's [1, n]."""
        ...


class LibrarySums:
    """By the process group: NCCL's, or gloo's on a CPU."""

    def add(self, y: Tensor) -> Tensor:
        dist.all_reduce(y)
        return y

    def each(self, mine: Tensor) -> Tensor:
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
        return torch.cat(found)


class SymmetricSums(LibrarySums):
    """By torch's symmetric memory, in one shot, what a step of one token adds; all else as LibrarySums.

    Every size has memory of its own, made when it is first asked for: all ranks must be there, outside a capture.
    """

    def __init__(self, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        assert group is not None
        self._symmetric: Any = symmetric
        self._group, self._device = group, device
        self._held: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
        self._shared(torch.Size((1, 1)), torch.float32)  # where there is none it fails now

    def add(self, y: Tensor) -> Tensor:
        if len(y) > 1:
            return super().add(y)
        shared = self._shared(y.shape, y.dtype)
        shared.copy_(y)
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._group.group_name)
        return out

    def each(self, mine: Tensor) -> Tensor:
        rows = torch.zeros(dist.get_world_size(), mine.shape[1], device=self._device)
        rows[dist.get_rank()] = mine[0]  # ids are below 2^24, and what is added to them is 0
        return self.add(rows.view(1, -1)).view(rows.shape)

    def _shared(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        key = tuple(shape), dtype
        if key not in self._held:
            made = self._symmetric.empty(*shape, dtype=dtype, device=self._device)
            self._symmetric.rendezvous(made, self._group)
            self._held[key] = made
        return self._held[key]


class SummedLinear(WideLinear):
    """The sum of all ranks' products."""

    sums: Sums

    def __call__(self, x: Tensor) -> Tensor:
        return self.sums.add(super().__call__(x))


class RankDecoder(PlainDecoder):
    """A rank's part: `forward` gives the logits of its own ids, [T, vocab / ranks]."""

    def __init__(self, weights: WeightSource, device: torch.device, context: int, sums: Sums | None = None) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.sums: Sums = sums or LibrarySums()
        own = RankWeights(weights, self.rank, self.ranks)
        super().__init__(own, device, context)
        for layer in self.layers:
            for name in ("o", "down"):
                layer[name].__class__ = SummedLinear
                layer[name].sums = self.sums
        if self.spec.tied_embeddings:
            self.head = self.embed.chunk(self.ranks)[self.rank]

    def best(self, logits: Tensor) -> Tensor:
        """int64 [1]: the id of the largest of all ranks' logits [1, vocab / ranks]."""
        value, at = logits.max(-1)
        mine = torch.stack([value.float(), (at + self.rank * logits.shape[1]).float()], 1)
        each = self.sums.each(mine)  # an id below 2^24 is a float32
        # A tensor of no dimension as an index would be read on the host, which no CUDA graph can capture.
        return each[:, 1].index_select(0, each[:, 0].argmax(0, keepdim=True)).long()

    def whole(self, logits: Sequence[Tensor]) -> Tensor:
        """float32 [T, vocab] of every rank's parts."""
        own = torch.cat(list(logits)).float()
        found = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(found, own)
        return torch.cat(found, 1)
