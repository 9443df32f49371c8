"""Library prefill on several GPUs: each runs its own shards of every pass, and module outputs go to all (forward.py).

One thread queues a piece on each GPU in turn. Prompts run in eager chunks, whatever their length: a graph of two GPUs
would keep their work apart from what else their streams do, and nothing here is as short as what graphs are for.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from kog_triton.backends import WeightSource
from kog_triton.backends.prefill.forward import Outputs, PrefillPass, ToHead, Work
from kog_triton.backends.prefill.library import (
    CHUNK,
    check_cache,
    check_prompt,
    chunks_of,
    fuses,
    on_device,
    pass_settings,
    upload_chunks,
)
from kog_triton.backends.prefill.slices import Piece, PromptRun, Rate
from kog_triton.backends.prefill.weights import Matrices, load_layer
from kog_triton.schedule.schedule import Schedule

Tensor = torch.Tensor


class Exchange:
    """Module outputs on their way between passes that walk the layers together, a piece of each in turn.

    sent   by rank, what each has put out since the last `deliver`
    every  by rank, all ranks' [all S, T, hidden], on its GPU: equal bits on each
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self.clear()

    def clear(self) -> None:
        self.sent: list[Tensor | None] = [None] * len(self._devices)
        self.every: list[Tensor | None] = [None] * len(self._devices)

    def deliver(self) -> None:
        """Behind a piece of all ranks, and ahead of the next of any: torch's copy from another GPU waits for what the
        streams of both were given before, and what comes next on either waits for it. So no output is read before it is
        there, and none's memory is used again meanwhile; but behind one GPU's next product a copy would wait for that.
        """
        parts = [o for o in self.sent if o is not None]
        if not parts:
            return
        assert len(parts) == len(self._devices), "all ranks send in one piece"
        for rank, device in enumerate(self._devices):
            with on_device(device):
                self.every[rank] = torch.cat([o.to(device, non_blocking=True) for o in parts])
        self.sent = [None] * len(self._devices)


class RankOutputs(Outputs):
    """One rank's end of an exchange."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self._rank = exchange, rank

    def send(self, o: Tensor) -> Tensor:
        self._exchange.sent[self._rank] = o
        return o

    def all(self, own: Tensor) -> Tensor:
        every = self._exchange.every[self._rank]
        assert every is not None, "delivered"
        return every


@dataclass(frozen=True)
class RankTensors:
    """What a rank's GPU holds: as LibraryPrefill's arguments of these names."""

    embed: Tensor
    rope: Tensor
    matrices: Matrices


class RankPrefill:
    """LibraryPrefill's part on the GPUs of all ranks. Caches are of each rank's shards, streams likewise."""

    def __init__(
        self,
        weights: WeightSource,
        schedule: Schedule,
        max_context: int,
        ranks: Sequence[RankTensors],
        chunk: int = CHUNK,
        fused: bool | None = None,
    ) -> None:
        self.spec, self.max_context, self.chunk = schedule.spec, max_context, chunk
        self.device = ranks[0].embed.device
        self._shape = (
            self.spec.num_layers,
            schedule.shards_per_rank,
            schedule.shard_kv_heads,
            2,
            self.spec.head_dim,
        )
        self._exchange = Exchange([held.embed.device for held in ranks])
        layers = range(self.spec.num_layers)
        self._passes = []
        for rank, held in enumerate(ranks):
            device, dtype = held.embed.device, held.embed.dtype
            assert len(held.rope) >= max_context
            own = [load_layer(weights, schedule, i, device, dtype, rank) for i in layers]
            fuse = fuses(device) if fused is None else fused
            self._passes.append(
                PrefillPass(
                    schedule,
                    held.embed,
                    own,
                    held.matrices,
                    held.rope,
                    fuse,
                    RankOutputs(self._exchange, rank),
                )
            )
        self._rate, self._ran = Rate(), False

    def begin(
        self,
        token_ids: Sequence[int],
        first: int,
        caches: Sequence[Tensor],
        streams: Sequence[Tensor] | None = None,
    ) -> PromptRun:
        """As LibraryPrefill's, with a cache a rank, and streams that a rank's shards begin their heads with."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        for walk, cache in zip(self._passes, caches, strict=True):
            check_cache(cache, self._shape, walk.dtype)
            check_prompt(ids, first, min(self.max_context, cache.shape[4]), self.spec.vocab_size)
        pieces = partial(self._pieces, ids, first, caches, streams)
        others = [walk.device for walk in self._passes[1:]]
        end = first + len(ids)
        return PromptRun(first, end, pieces, self._settings, self.device, self._rate, others=others)

    def _pieces(
        self,
        ids: Tensor,
        first: int,
        caches: Sequence[Tensor],
        streams: Sequence[Tensor] | None,
        at_once: bool,
    ) -> Iterator[Piece]:
        parts = chunks_of(first, len(ids), self.chunk)
        there = [upload_chunks(ids, parts, walk.device) for walk in self._passes]
        for part in parts:
            at, runs = first + part.start, []
            for rank, walk in enumerate(self._passes):
                tokens, last = there[rank]
                ends = part is parts[-1] and streams is not None
                head = ToHead(streams[rank], last) if ends and streams is not None else None
                runs.append(walk.layers_of(tokens[part], at, caches[rank], head))
            try:
                yield from (
                    Piece(at, work.amount, work.kind, work.rows) for work in self._together(runs)
                )
            finally:  # called off, too
                self._exchange.clear()
        self._ran = True

    def _together(self, runs: Sequence[Iterator[Work]]) -> Iterator[Work]:
        """A piece of each rank, then what all put out to all, then the next piece."""
        while True:
            works = []
            for walk, run in zip(self._passes, runs, strict=True):
                with on_device(walk.device):
                    works.append(next(run, None))
            self._exchange.deliver()
            if works[0] is None:
                return
            yield works[0]

    def make_ready(self) -> bool:
        """No graphs are to be captured."""
        return False

    def memory_bytes(self) -> int:
        """Of all GPUs: norms and biases, and what matrices keep beside the weights."""
        small = sum(t.nbytes for walk in self._passes for w in walk.layers for t in w.tensors())
        return small + sum(walk.matrices.nbytes for walk in self._passes)

    def _settings(self) -> AbstractContextManager[None]:
        return pass_settings(self.device, self._ran)
