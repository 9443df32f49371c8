"""Library prefill on several GPUs: each runs its own shards of every pass, and module outputs go to all (forward.py).

Module outputs go by torch's copies (`Exchange`), or as a backend brings them (`RankExchange`). By copies a pass is
queued a piece on each GPU in turn, eagerly, which takes the host longer than most prompts take the GPUs. A backend that
brings outputs without the host lets each GPU's pass be a CUDA graph of its own: so fresh prompts are padded to the size
of a bucket, like LibraryPrefill's, and run by graphs where nobody waits beside them. What is longer than all buckets,
and what stands behind a cached prefix, runs in eager chunks.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from kog_triton.backends import WeightSource
from kog_triton.backends.embedding import Embedding
from kog_triton.backends.prefill.forward import Outputs, PrefillPass, ToHead, Work
from kog_triton.backends.prefill.library import (
    CHUNK,
    check_cache,
    check_prompt,
    chunks_of,
    fuses,
    on_device,
    pass_settings,
    piece_of,
    upload_chunks,
)
from kog_triton.backends.prefill.slices import Piece, PromptRun, Rate
from kog_triton.backends.prefill.upload import upload
from kog_triton.backends.prefill.weights import LayerWeights, Matrices, load_layer
from kog_triton.errors import first_line
from kog_triton.schedule.schedule import Schedule

log = logging.getLogger(__name__)
Tensor = torch.Tensor
# Of padded passes; a prompt of more than 256 tokens is padded by half of its length at most.
SHORT = 512  # tokens: as one piece it goes ahead of others
UNCUT = 256  # tokens whose graph runs at once beside others, too
RANK_BUCKETS = (128, 256, 384, 512, 768, 1024, 1536, 2048)


class RankExchange(Protocol):
    """How module outputs get from each rank's pass to all.

    meets  GPUs wait for each other while they run it
    """

    @property
    def meets(self) -> bool: ...

    def outputs(self, rank: int) -> Outputs: ...

    def begin(self) -> None:
        """Of a pass, on all ranks; the one before may have been called off."""

    def deliver(self) -> None:
        """Behind a piece of all ranks."""

    def end(self) -> None:
        """Of a pass, on all ranks."""

    def gave_up(self) -> str:
        """What a pass has waited for in vain that nobody was told of yet, or ""."""

    @property
    def nbytes(self) -> int: ...


class Exchange:
    """Module outputs on their way between passes that walk the layers together, a piece of each in turn.

    sent   by rank, what each has put out since the last `deliver`
    every  by rank, all ranks' [all S, T, hidden], on its GPU: equal bits on each
    """

    meets, nbytes = False, 0

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._clear()

    def outputs(self, rank: int) -> Outputs:
        return RankOutputs(self, rank)

    def begin(self) -> None:
        """Without what a pass that was called off has left: nobody tells when it was."""
        self._clear()

    def end(self) -> None:
        self._clear()

    def gave_up(self) -> str:
        return ""

    def _clear(self) -> None:
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

    embed: Embedding
    rope: Tensor
    matrices: Matrices


class Bucketed:
    """What a rank's padded passes run in: tokens, keys and values of their own, and a prompt's last streams.

    words  int64: the number of the last token that is no padding, then tokens
    """

    def __init__(self, walk: PrefillPass, shape: Sequence[int], schedule: Schedule, longest: int) -> None:
        device, (layers, shards, heads, kinds, width) = walk.device, shape
        self.walk = walk
        self.words = torch.zeros(1 + longest, dtype=torch.int64, device=device)
        self._cache = torch.zeros(layers, shards, heads, kinds, longest, width, dtype=walk.dtype, device=device)
        streams = torch.zeros(shards, schedule.spec.hidden_size, device=device)
        self._head = ToHead(streams, self.words[:1])

    def write(self, ids: Tensor, size: int) -> None:
        """Padded with a token of its own: another request's might hold NaN, which a weight of zero does not undo."""
        count = len(ids)
        padded = torch.cat([torch.tensor([count - 1]), ids, ids[-1:].expand(size - count)])
        upload(padded, self.words[: 1 + size])

    def layers_of(self, size: int) -> Iterator[Work]:
        cache = self._cache[..., :size, :]
        return self.walk.layers_of(self.words[1 : 1 + size], 0, cache, self._head)

    def read(self, count: int, cache: Tensor, streams: Tensor | None) -> None:
        """What no padding left, to its home."""
        cache[..., :count, :].copy_(self._cache[..., :count, :])
        if streams is not None:
            streams.copy_(self._head.streams)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.words, self._cache, self._head.streams))


def bucket_bytes(schedule: Schedule, max_context: int, itemsize: int = 2) -> int:
    """Of one GPU: keys and values of a pass of the longest bucket."""
    longest = max((size for size in RANK_BUCKETS if size <= max_context), default=0)
    heads = schedule.spec.num_layers * schedule.shards_per_rank * schedule.shard_kv_heads
    return 2 * heads * longest * schedule.spec.head_dim * itemsize


class RankRun(PromptRun):
    """A prompt on all ranks, whose passes come one behind the other: what they run in (Bucketed) and what is on its way
    between GPUs is there once. A short prompt that came meanwhile begins between two passes of a long one."""

    def waits_for(self, other: PromptRun) -> bool:
        return other is not self and isinstance(other, RankRun) and other.inside


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
        exchange: RankExchange | None = None,
        buckets: Sequence[int] = (),
    ) -> None:
        """`exchange`: None for torch's copies. `buckets`: sizes of padded passes; none with torch's copies."""
        self.spec, self.max_context, self.chunk = schedule.spec, max_context, chunk
        self.device = ranks[0].embed.device
        self._shape = (self.spec.num_layers, schedule.shards_per_rank, schedule.shard_kv_heads, 2, self.spec.head_dim)
        devices = [held.embed.device for held in ranks]
        self._exchange: RankExchange = exchange or Exchange(devices)
        layers = range(self.spec.num_layers)
        self._passes = []
        for rank, held in enumerate(ranks):
            device, dtype = held.embed.device, held.embed.dtype
            assert len(held.rope) >= max_context
            own = [load_layer(weights, schedule, i, device, dtype, rank) for i in layers]
            fuse = fuses(device) if fused is None else fused
            self._passes.append(
                PrefillPass(schedule, held.embed, own, held.matrices, held.rope, fuse, self._exchange.outputs(rank))
            )
        self._rate, self._ran = Rate(), False
        self._sizes = [size for size in buckets if size <= min(max_context, CHUNK)]
        self._buckets = [
            Bucketed(walk, self._shape, schedule, max(self._sizes)) for walk in self._passes if self._sizes
        ]
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self._to_capture = list(self._sizes) if self.device.type == "cuda" else []
        self._captured_bytes = 0

    def begin(
        self, token_ids: Sequence[int], first: int, caches: Sequence[Tensor], streams: Sequence[Tensor] | None = None
    ) -> PromptRun:
        """As LibraryPrefill's, with a cache a rank, and streams that a rank's shards begin their heads with."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        for walk, cache in zip(self._passes, caches, strict=True):
            check_cache(cache, self._shape, walk.dtype)
            check_prompt(ids, first, min(self.max_context, cache.shape[4]), self.spec.vocab_size)
        pieces = partial(self._pieces, ids, first, caches, streams)
        others = [walk.device for walk in self._passes[1:]]
        end, short = first + len(ids), first == 0 and 0 < self._size_for(len(ids)) <= SHORT
        run = RankRun(first, end, pieces, self._settings, self.device, self._rate, short, others=others)
        run.meets = self._exchange.meets
        return run

    def _size_for(self, count: int) -> int:
        """The bucket of so many tokens; 0: none."""
        return next((size for size in self._sizes if size >= count), 0)

    def _pieces(
        self, ids: Tensor, first: int, caches: Sequence[Tensor], streams: Sequence[Tensor] | None, at_once: bool
    ) -> Iterator[Piece]:
        size = self._size_for(len(ids))
        if size and first == 0:
            yield from self._bucket(ids, size, caches, streams, at_once)
            return
        parts = chunks_of(first, len(ids), self.chunk)
        there = [upload_chunks(ids, parts, walk.device) for walk in self._passes]
        for part in parts:
            at, runs = first + part.start, []
            if part is not parts[0]:
                yield Piece(at, 0.0, begins=True)
            for rank, walk in enumerate(self._passes):
                tokens, last = there[rank]
                ends = part is parts[-1] and streams is not None
                head = ToHead(streams[rank], last) if ends and streams is not None else None
                runs.append(walk.layers_of(tokens[part], at, caches[rank], head))
            yield from (piece_of(at, work) for work in self._whole(runs))
        self._ran = True

    # ---- buckets ----

    def _bucket(
        self, ids: Tensor, size: int, caches: Sequence[Tensor], streams: Sequence[Tensor] | None, at_once: bool
    ) -> Iterator[Piece]:
        for held in self._buckets:
            held.write(ids, size)
        if size in self._graphs and (at_once or size <= UNCUT):
            with self._exchanged():
                for walk, graph in zip(self._passes, self._graphs[size], strict=True):
                    with on_device(walk.device):
                        graph.replay()
        else:
            runs = [held.layers_of(size) for held in self._buckets]
            yield from (piece_of(0, work) for work in self._whole(runs))
        for rank, held in enumerate(self._buckets):
            with on_device(held.walk.device):
                held.read(len(ids), caches[rank], None if streams is None else streams[rank])
        self._ran = True

    def _pad(self, size: int) -> None:
        """A pass of whatever tokens there are, to its end."""
        for _ in self._whole([held.layers_of(size) for held in self._buckets]):
            pass
        self._ran = True

    def _capture(self, size: int) -> None:
        for held in self._buckets:
            held.words.zero_()
        self._pad(size)  # makes what libraries make at their first call, which no graph can hold
        before = self._graphs.get(next(iter(self._graphs), 0))
        graphs = []
        self._exchange.begin()  # what a graph holds begins there, too
        for rank, held in enumerate(self._buckets):
            graph = torch.cuda.CUDAGraph()
            pool = before[rank].pool() if before else None  # none runs beside another of its GPU
            # torch captures on one stream of its own, which is of the first GPU that it captured on.
            stream = torch.cuda.Stream(held.walk.device)
            capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with on_device(held.walk.device), capture:
                for _ in held.layers_of(size):
                    pass
            graphs.append(graph)
        self._exchange.end()
        self._graphs[size] = graphs

    def _whole(self, runs: Sequence[Iterator[Work]]) -> Iterator[Work]:
        """A pass of all ranks with what goes between them, from the first exchange to the last.

        One that is called off ends here whenever it is freed, which may be inside of another: it touches nothing then.
        """
        with self._exchanged():
            yield from self._together(runs)

    @contextmanager
    def _exchanged(self) -> Iterator[None]:
        """Around a pass. One that fails on a rank ends at once: the other ranks wait for what it was to send."""
        self._exchange.begin()
        try:
            yield
        except Exception:
            self._exchange.end()
            raise
        self._exchange.end()

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

    @property
    def layers(self) -> list[Sequence[LayerWeights]]:
        """By rank."""
        return [walk.layers for walk in self._passes]

    def make_ready(self) -> bool:
        """Capture the graphs of one more bucket; whether there may be others. Where memory is short its prompts run
        eagerly."""
        if not self._to_capture:
            return False
        size = self._to_capture.pop()  # the largest first: the others fit its memory
        before = self._reserved()
        try:
            with self._settings():
                self._capture(size)
        except torch.OutOfMemoryError as error:
            self._to_capture.clear()
            log.warning("no graphs of prompts of up to %d tokens on several GPUs: %s", size, first_line(error))
        self._captured_bytes += max(self._reserved() - before, 0)
        return bool(self._to_capture)

    def _reserved(self) -> int:
        """Of all GPUs, behind what nobody needs."""
        torch.cuda.empty_cache()
        devices = {walk.device for walk in self._passes}
        return sum(torch.cuda.memory_reserved(device) for device in devices)

    def gave_up(self) -> str:
        return self._exchange.gave_up()

    def memory_bytes(self) -> int:
        """Of all GPUs: norms and biases, and what matrices keep beside the weights."""
        small = sum(t.nbytes for walk in self._passes for w in walk.layers for t in w.tensors())
        small += sum(held.nbytes for held in self._buckets) + self._exchange.nbytes
        return small + self._captured_bytes + sum(walk.matrices.nbytes for walk in self._passes)

    def _settings(self) -> AbstractContextManager[None]:
        return pass_settings(self.device, self._ran)
