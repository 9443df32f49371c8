"""Library prefill: torch's matrix products run a prompt into the cache that a kernel then reads.

Three ways, one pass of the layers (forward.py):

    bucket   a fresh prompt of up to 512 tokens, padded at its end to the next size; on a GPU the
             pass is captured in a CUDA graph once nobody waits (`make_ready`). It fills a cache of
             its own, whose unpadded positions are copied out: padding never reaches the caller's.
    suffix   up to 512 tokens behind a cached prefix, on a GPU: likewise (suffixes.py)
    chunks   all others, eagerly, up to the next multiple of `chunk` positions

The matrices are the backend's own, taken out of its kernel's order one at a time (weights.py). Nothing
waits for the device: what is launched next on the same stream finds the cache filled. One thread at a
time may use it, for one prompt at a time. A prompt can be run in slices (slices.py).
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kog_triton.backends import BackendOptions, WeightSource
from kog_triton.backends.compile_log import told_if_slow
from kog_triton.backends.embedding import Embedding
from kog_triton.backends.mailbox import Request
from kog_triton.backends.prefill.forward import PrefillPass, ToHead, Work
from kog_triton.backends.prefill.graphs import Graphed, PassGraphs
from kog_triton.backends.prefill.slices import Piece, PromptRun, Rate
from kog_triton.backends.prefill.suffixes import SIZES, Suffixes, reads_suffixes, size_of
from kog_triton.backends.prefill.upload import upload
from kog_triton.backends.prefill.weights import LayerWeights, Matrices, load_layer
from kog_triton.errors import ModelError, RequestError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.schedule import build

log = logging.getLogger(__name__)
Tensor = torch.Tensor
L = TypeVar("L")
BUCKET, SUFFIX = "bucket", "suffix"
BUCKETS = (16, 32, 64, 128, 256, 512)
# Tokens of one eager pass: enough to keep matrix products busy, and a bound on what a pass holds,
# whose widest tensors are chunk x 2 F a lane.
CHUNK = 2048


@dataclass(frozen=True)
class Crossover:
    """Tokens ahead of a prompt's last from which the library is faster than a backend's kernel."""

    fresh: int
    behind: int  # a cached prefix


# Of a kernel that makes one pass a token: on one H200 with Llama-3.2-1B a pass takes 0.59 ms, a
# bucket 1.55 ms, and an eager pass, behind a cached prefix, 4.3 ms (development runs:
# benchmarks/cuda-log.md#library-prefill).
BY_TOKEN = Crossover(3, 8)


def choose_prefill(num_new_tokens: int, first: int = 0, crossover: Crossover = BY_TOKEN) -> str:
    """What `--prefill auto` means for so many tokens behind `first` cached: "kernel" or "library"."""
    least = crossover.behind if first else crossover.fresh
    return "library" if num_new_tokens >= least else "kernel"


def bucket_sizes(max_context: int, buckets: Sequence[int] = BUCKETS) -> list[int]:
    """Those of prompts that fit the context, ascending: the last one may be longer."""
    shorter = sum(size < max_context for size in buckets)
    return sorted(buckets)[: shorter + 1]


def rope_positions(max_context: int) -> int:
    """Of a table of RoPE that a backend shares with its library: padding may pass the end of the context."""
    return max(max_context, bucket_sizes(max_context)[-1])


def fuses(device: torch.device) -> bool:
    """Whether Triton's kernels run between the matrix products."""
    return device.type == "cuda" and find_spec("triton") is not None


def wants_library(options: BackendOptions, device: torch.device) -> bool:
    return options.prefill == "library" or (options.prefill == "auto" and device.type != "cpu")


def open_library(
    options: BackendOptions,
    weights: WeightSource,
    spec: ModelSpec,
    max_context: int,
    embed: Embedding,
    rope: Tensor,
    matrices: Callable[[], Matrices],
    slots: Tensor | None = None,
) -> "LibraryPrefill | None":
    """The library beside a backend's kernel, as `options.prefill` asks; None for the kernel alone.

    embed     that the backend holds, in the type and place of its cache
    rope      the backend's table, float32 [`rope_positions` or more, 2, d / 2]
    matrices  makes the backend's own ready; norms and biases are read again, from `weights`
    slots     as LibraryPrefill's
    """
    if not wants_library(options, embed.device):
        return None
    return LibraryPrefill(weights, spec, max_context, embed, rope, matrices(), slots=slots)


def library_for(request: Request, library: L | None, wanted: str, crossover: Crossover = BY_TOKEN) -> L | None:
    """What is to run a request's prompt; None: the kernel, as where all but its last token is cached.

    wanted     a `BackendOptions.prefill`; without a library it is the kernel's
    crossover  of this kernel, for "auto"
    """
    new = len(request.prompt) - 1 - request.cached
    if wanted == "auto":
        wanted = choose_prefill(new, request.cached, crossover)
    return None if wanted == "kernel" or not new else library


class LibraryPrefill:
    """Runs prompts of one model on one device.

    embed     that the caller holds; device and dtype are those of the pass
    rope      the caller's table of as many positions as the context and the longest bucket have
    matrices  the caller's, of the same device and dtype
    buckets   their sizes; none: fresh prompts are run as those behind a cached prefix
    to_head   passes go on to a prompt's last streams, which a head reads
    fused     Triton's kernels between the matrix products; None: on a GPU, where Triton is installed
    slots     the caches of all its requests, [slots, *those of a `cache`]: suffixes in them have graphs
    """

    def __init__(
        self,
        weights: WeightSource,
        spec: ModelSpec,
        max_context: int,
        embed: Embedding,
        rope: Tensor,
        matrices: Matrices,
        buckets: Sequence[int] = BUCKETS,
        chunk: int = CHUNK,
        fused: bool | None = None,
        to_head: bool = False,
        slots: Tensor | None = None,
    ) -> None:
        device, dtype = embed.device, embed.dtype
        self.spec, self.max_context, self.device, self.chunk = spec, max_context, device, chunk
        schedule = build(spec)
        layers = [load_layer(weights, schedule, i, device, dtype) for i in range(spec.num_layers)]
        self._sizes = bucket_sizes(max_context, buckets)
        longest = max(self._sizes, default=0)
        assert len(rope) >= max(max_context, longest), "padding may pass its end"
        if fused is None:
            fused = fuses(device)
        self._pass = PrefillPass(schedule, embed, layers, matrices, rope, fused)
        self._rate = Rate()
        # The number of the last token that is no padding, and a bucket's tokens.
        self._words = torch.zeros(1 + longest, dtype=torch.int64, device=device)
        self._head: ToHead | None = None
        if to_head:
            streams = torch.zeros(spec.num_lanes, spec.hidden_size, device=device)
            self._head = ToHead(streams, self._words[:1])
        shape = (spec.num_layers, spec.num_lanes, spec.lane_kv_heads, 2)
        self._scratch = torch.zeros((*shape, longest, spec.head_dim), dtype=dtype, device=device)
        self._suffixes: Suffixes | None = None
        if slots is not None and fused and reads_suffixes(slots):
            self._suffixes = Suffixes(self._pass, slots, self._head and self._head.streams)
        sizes = {BUCKET: self._sizes[::-1], SUFFIX: SIZES if self._suffixes else ()}
        passes = [Graphed(kind, size) for kind in sizes for size in sizes[kind]]
        self._graphs = PassGraphs(device, passes)
        # Of which kinds a pass was queued to its end: no kernel of theirs is compiled or loaded any more.
        self._ran: set[str] = set()

    def run(self, token_ids: Sequence[int], first: int, cache: Tensor) -> None:
        """Fill positions [first, first + n) of `cache` with the keys and values of n tokens.

        cache  [layers, lanes, lane_kv_heads, 2, positions, d] in the pass's dtype, of any strides
               but 1 along d; positions before `first` hold what precedes the tokens
        Launches on the current stream. RequestError if the tokens do not fit or are none of the
        model's, ModelError if the cache is another model's.
        """
        if token_ids:
            self.begin(token_ids, first, cache).advance(math.inf, at_once=True)

    def begin(self, token_ids: Sequence[int], first: int, cache: Tensor, streams: Tensor | None = None) -> PromptRun:
        """As `run`, but nothing is queued yet; `cache` is written to until the run has ended or is let go.

        streams  float32 [lanes, hidden]: get those of the last token behind all layers; of a library `to_head`
        """
        assert streams is None or self._head is not None
        ids = torch.tensor(token_ids, dtype=torch.int64)
        self._check(ids, first, cache)
        row = self._suffixes.row_of(first, len(ids), cache) if self._suffixes else None
        settings = partial(self._settings, BUCKET if row is None else SUFFIX)
        pieces = partial(self._pieces, ids, first, cache, streams, row)
        end, short = first + len(ids), first == 0 and self._size_for(len(ids)) > 0
        return PromptRun(first, end, pieces, settings, self.device, self._rate, short)

    def _size_for(self, count: int) -> int:
        """The bucket of so many tokens; 0: none."""
        return next((size for size in self._sizes if size >= count), 0)

    def _pieces(
        self, ids: Tensor, first: int, cache: Tensor, streams: Tensor | None, row: int | None, at_once: bool
    ) -> Iterator[Piece]:
        """A product or an attention after the other, or a graph of all. row: a suffix's slot (suffixes.py)."""
        size = self._size_for(len(ids))
        if self._suffixes is not None and row is not None:
            yield from self._suffix(self._suffixes, ids, first, row, at_once)
            if streams is not None and self._head is not None:
                streams.copy_(self._head.streams)
        elif size and first == 0:
            yield from self._bucket(ids, size, cache, at_once)
            if streams is not None and self._head is not None:
                streams.copy_(self._head.streams)
        else:
            yield from self._chunks(ids, first, cache, streams)
        self._ran.add(BUCKET if row is None else SUFFIX)

    def _suffix(self, suffixes: Suffixes, ids: Tensor, first: int, row: int, at_once: bool) -> Iterator[Piece]:
        wanted = Graphed(SUFFIX, size_of(len(ids)))
        if at_once and wanted in self._graphs:
            suffixes.write(ids, first, row)
            self._graphs.replay(wanted)
        else:
            for work in suffixes.pieces(ids, first, row):
                yield piece_of(first, work)

    def _chunks(self, ids: Tensor, first: int, cache: Tensor, streams: Tensor | None) -> Iterator[Piece]:
        parts = chunks_of(first, len(ids), self.chunk)
        there, last = upload_chunks(ids, parts, self.device)
        for part in parts:
            ends = streams is not None and part is parts[-1]
            head = ToHead(streams, last) if ends and streams is not None else None
            at = first + part.start
            for work in self._pass.layers_of(there[part], at, cache, head):
                yield piece_of(at, work)

    @property
    def layers(self) -> Sequence[LayerWeights]:
        return self._pass.layers

    def compile_ahead(self, cache: Tensor) -> None:
        """Begin to compile what Triton runs in passes, which the first of them waits for. cache: as `run`'s."""
        told = None if self._suffixes is None else (self._suffixes.words, cache)
        self._pass.compile_ahead([self._scratch, cache], told)

    def memory_bytes(self) -> int:
        """Bytes held beside what the caller holds: the buckets' cache, graphs, norms and biases."""
        walk = self._pass
        small = sum(t.nbytes for layer in walk.layers for t in layer.tensors())
        held = [self._scratch, self._words]
        if self._head is not None:
            held.append(self._head.streams)
        small += sum(t.nbytes for t in held)
        if self._suffixes is not None:
            small += self._suffixes.nbytes
        return small + self._graphs.nbytes + walk.matrices.nbytes

    # ---- buckets ----

    def _bucket(self, ids: Tensor, size: int, cache: Tensor, at_once: bool) -> Iterator[Piece]:
        count = len(ids)
        # Padded with a token of its own: another request's might hold NaN, which a weight of zero
        # does not undo.
        padded = torch.cat([torch.tensor([count - 1]), ids, ids[-1:].expand(size - count)])
        upload(padded, self._words[: 1 + size])
        if at_once and Graphed(BUCKET, size) in self._graphs:
            self._graphs.replay(Graphed(BUCKET, size))
        else:
            scratch = self._scratch[..., :size, :]
            ids = self._words[1 : 1 + size]
            for work in self._pass.layers_of(ids, 0, scratch, self._head):
                yield piece_of(0, work)
        cache[..., :count, :].copy_(self._scratch[..., :count, :])

    # ---- graphs ----

    def make_ready(self) -> bool:
        """Capture the graph of one more pass; whether there may be others."""
        return self._graphs.make_ready(self._empty, self._run, self._settings)

    def _empty(self) -> None:
        self._words.zero_()  # a longer prompt's last token would be none of a bucket's
        if self._suffixes is not None:
            self._suffixes.empty()

    def _run(self, wanted: Graphed) -> None:
        """Queue what words tell."""
        kind, size = wanted
        if kind == BUCKET:
            scratch = self._scratch[..., :size, :]
            self._pass.run(self._words[1 : 1 + size], 0, scratch, self._head)
        elif self._suffixes is not None:
            self._suffixes.run(size)
        self._ran.add(kind)

    # ---- around a pass ----

    def _settings(self, kind: str) -> AbstractContextManager[None]:
        """Of passes of a kind; chunks' kernels are those of buckets."""
        return pass_settings(self.device, kind in self._ran)

    def _check(self, ids: Tensor, first: int, cache: Tensor) -> None:
        shape = (*self._scratch.shape[:4], self.spec.head_dim)
        room = min(self.max_context, cache.shape[4])
        check_cache(cache, shape, self._scratch.dtype)
        check_prompt(ids, first, room, self.spec.vocab_size)


# ---- of every pass ----


def chunks_of(first: int, count: int, chunk: int) -> list[slice]:
    """The tokens of the passes of a prompt of `count` from position `first` on: each ends at a multiple of `chunk`."""
    ends = [*range(first // chunk * chunk + chunk, first + count, chunk), first + count]
    return [slice(start - first, end - first) for start, end in zip([first, *ends[:-1]], ends, strict=True)]


def upload_chunks(ids: Tensor, chunks: Sequence[slice], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens on a device, and the number of the last one in its chunk, int64 [1]."""
    words = torch.empty(1 + len(ids), dtype=torch.int64, device=device)
    last = torch.tensor([len(ids) - 1 - chunks[-1].start])
    upload(torch.cat([last, ids]), words)
    return words[1:], words[:1]


def piece_of(filled: int, work: Work) -> Piece:
    return Piece(filled, work.amount, work.kind, work.rows)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def pass_settings(device: torch.device, ran: bool) -> Iterator[None]:
    """Sums of products in float32, and attention that no new length makes slow at first. `ran`: see LibraryPrefill."""
    with torch.inference_mode(), on_device(device):
        if device.type != "cuda":
            yield
            return
        products = torch.backends.cuda.matmul
        names = [f"allow_{t}_reduced_precision_reduction" for t in ("bf16", "fp16")]
        before = [getattr(products, name) for name in names]
        for name in names:
            setattr(products, name, False)
        # Not cuDNN's: it builds a plan for every length.
        kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        first = nullcontext() if ran else told_if_slow("what runs between products")
        try:
            with sdpa_kernel(kinds), first:
                yield
        finally:
            for name, value in zip(names, before, strict=True):
                setattr(products, name, value)


def check_cache(cache: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """ModelError for one that is not [*shape[:4], positions, shape[4]] of dtype."""
    if (*cache.shape[:4], *cache.shape[5:]) != tuple(shape) or cache.dtype != dtype:
        raise ModelError(
            f"the cache is {cache.dtype} {tuple(cache.shape)}: library prefill wants "
            f"{dtype} [{', '.join(map(str, shape[:4]))}, positions, {shape[4]}]"
        )


def check_prompt(ids: Tensor | Sequence[int], first: int, room: int, vocab: int) -> None:
    """RequestError for tokens that do not fit positions [first, room), or are none of the model's."""
    end = first + len(ids)
    if first < 0 or end > room:
        raise RequestError(f"positions {first} to {end - 1} do not fit a cache of {room}")
    least, most = (ids.min(), ids.max()) if isinstance(ids, Tensor) else (min(ids), max(ids))
    for token in (int(least), int(most)):
        if not 0 <= token < vocab:
            raise RequestError(f"token id {token} is outside the vocabulary of {vocab}")
