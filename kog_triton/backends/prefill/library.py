"""Library prefill: torch's matrix products run a prompt into the cache that a kernel then reads.

Two ways, one pass of the layers (forward.py):

    bucket   a fresh prompt of up to 512 tokens, padded at its end to the next size; on a GPU the
             pass was captured in a CUDA graph when the model was loaded. It fills a cache of its
             own, whose unpadded positions are copied out: padding never reaches the caller's.
    chunks   longer prompts and those behind a cached prefix, eagerly, `chunk` tokens at a time

It holds a second copy of the layers' weights (`memory_bytes` says how much), so a backend makes one
only if its prefill may be "library". Nothing waits for the device: what is launched next on the
same stream finds the cache filled. One thread at a time may use it.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from kog_triton.backends import BackendOptions, WeightSource
from kog_triton.backends.mailbox import Request
from kog_triton.backends.prefill.forward import PrefillPass
from kog_triton.backends.prefill.upload import upload
from kog_triton.backends.prefill.weights import load_layer
from kog_triton.errors import ModelError, RequestError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.rope import rope_table

Tensor = torch.Tensor
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


def wants_library(options: BackendOptions, device: torch.device) -> bool:
    return options.prefill == "library" or (options.prefill == "auto" and device.type != "cpu")


def open_library(
    options: BackendOptions,
    weights: WeightSource,
    spec: ModelSpec,
    max_context: int,
    embed: Tensor,
    weight_bytes: int,
) -> "LibraryPrefill | None":
    """The library beside a backend's kernel, as `options.prefill` asks; None for the kernel alone.

    embed         rows [vocab, hidden] that the backend holds, in the type and place of its cache
    weight_bytes  of the backend's own copy: "auto" takes no second one where memory is short, and
                  warns
    """
    if not wants_library(options, embed.device):
        return None
    if options.prefill == "auto":
        free, _ = torch.cuda.mem_get_info(embed.device)
        if weight_bytes > free // 2:
            warnings.warn(
                "prompts run in the kernel: a second copy of the weights for "
                "library prefill would take more than half of the free memory",
                stacklevel=3,
            )
            return None
    return LibraryPrefill(weights, spec, max_context, embed.device, embed.dtype, embed)


def run_prompt(
    library: "LibraryPrefill | None",
    wanted: str,
    request: Request,
    cache: Tensor,
    crossover: Crossover = BY_TOKEN,
) -> int:
    """Fill the slot's cache where that pays; the position from which the kernel is to compute.

    wanted     a `BackendOptions.prefill`; without a library it is the kernel's
    crossover  of this kernel, for "auto"
    """
    new, first = request.prompt[request.cached : -1], request.cached
    if wanted == "auto":
        wanted = choose_prefill(len(new), first, crossover)
    if library is None or wanted == "kernel":
        return first
    library.run(new, first, cache)
    return len(request.prompt) - 1


class LibraryPrefill:
    """Runs prompts of one model on one device.

    embed  rows [vocab, hidden] that the caller holds already; loaded if None
    fused  Triton's kernels between the matrix products; None: on a GPU, where Triton is installed
    """

    def __init__(
        self,
        weights: WeightSource,
        spec: ModelSpec,
        max_context: int,
        device: torch.device,
        dtype: torch.dtype,
        embed: Tensor | None = None,
        buckets: Sequence[int] = BUCKETS,
        chunk: int = CHUNK,
        fused: bool | None = None,
    ) -> None:
        self.spec, self.max_context, self.device, self.chunk = spec, max_context, device, chunk
        self._owns_embed = embed is None
        if embed is None:
            embed = weights.load("embed").to(device, dtype)
        layers = [load_layer(weights, spec, i, device, dtype) for i in range(spec.num_layers)]
        shorter = sum(size < max_context for size in buckets)
        self._sizes = sorted(buckets)[: shorter + 1]
        longest = max(max_context, self._sizes[-1])  # padding may pass the end of the context
        table = torch.from_numpy(rope_table(spec.rope, spec.head_dim, longest)).to(device)
        rope = torch.complex(table[:, 0], table[:, 1])
        if fused is None:
            fused = device.type == "cuda" and find_spec("triton") is not None
        self._pass = PrefillPass(spec, embed, layers, rope, fused)
        self._ids = torch.zeros(self._sizes[-1], dtype=torch.int64, device=device)
        shape = (spec.num_layers, spec.num_lanes, spec.lane_kv_heads, 2)
        self._scratch = torch.zeros(
            (*shape, self._sizes[-1], spec.head_dim), dtype=dtype, device=device
        )
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._captured_bytes = 0  # of what graphs run in, cuBLAS's workspaces among it
        if device.type == "cuda":
            self._capture_all()

    def run(self, token_ids: Sequence[int], first: int, cache: Tensor) -> None:
        """Fill positions [first, first + n) of `cache` with the keys and values of n tokens.

        cache  [layers, lanes, lane_kv_heads, 2, positions, d] in the pass's dtype, of any strides
               but 1 along d; positions before `first` hold what precedes the tokens
        Launches on the current stream. RequestError if the tokens do not fit or are none of the
        model's, ModelError if the cache is another model's.
        """
        if not token_ids:
            return
        ids = torch.tensor(token_ids, dtype=torch.int64)
        self._check(ids, first, cache)
        size = next((s for s in self._sizes if s >= len(ids)), 0)
        if size and first == 0:
            self._run_bucket(ids, size, cache)
            return
        with self._settings():
            there = torch.empty_like(ids, device=self.device)
            upload(ids, there)
            for part in there.split(self.chunk):
                self._pass.run(part, first, cache)
                first += len(part)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held: "weights", the layers' once more; "other", the buckets' cache, tables and graphs."""
        walk = self._pass
        weights = sum(layer.nbytes for layer in walk.layers)
        if self._owns_embed:
            weights += walk.embed.nbytes
        other = walk.rope.nbytes + self._scratch.nbytes + self._ids.nbytes + self._captured_bytes
        return {"weights": weights, "other": other}

    # ---- buckets ----

    def _run_bucket(self, ids: Tensor, size: int, cache: Tensor) -> None:
        count = len(ids)
        # Padded with a token of its own: another request's might hold NaN, which a weight of zero
        # does not undo.
        padded = torch.cat([ids, ids[-1:].expand(size - count)])
        with torch.inference_mode(), self._on_device():
            upload(padded, self._ids[:size])
            if size in self._graphs:
                self._graphs[size].replay()  # with the settings that it was captured with
            else:
                with self._settings():
                    self._pad(size)
            cache[..., :count, :].copy_(self._scratch[..., :count, :])

    def _pad(self, size: int) -> None:
        self._pass.run(self._ids[:size], 0, self._scratch[..., :size, :])

    def _capture_all(self) -> None:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        with self._settings():
            for size in reversed(self._sizes):  # the largest first: the others fit its memory
                self._capture(size)
        torch.cuda.empty_cache()
        self._captured_bytes = max(torch.cuda.memory_reserved(self.device) - before, 0)

    def _capture(self, size: int) -> None:
        # Makes what libraries make at their first call, which no graph can hold. On no other stream: cuBLAS keeps a
        # workspace a stream, of 32 MiB on an H100.
        self._pad(size)
        graph = torch.cuda.CUDAGraph()
        # Graphs run one after another and nothing in their memory outlives a replay: they share it.
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._pad(size)
        self._graphs[size] = graph

    # ---- around a pass ----

    @contextmanager
    def _settings(self) -> Iterator[None]:
        """Sums of products in float32, and attention that no new length makes slow at first."""
        with torch.inference_mode(), self._on_device():
            if self.device.type != "cuda":
                yield
                return
            products = torch.backends.cuda.matmul
            names = [f"allow_{t}_reduced_precision_reduction" for t in ("bf16", "fp16")]
            before = [getattr(products, name) for name in names]
            for name in names:
                setattr(products, name, False)
            # Not cuDNN's: it builds a plan for every length.
            kinds = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
            try:
                with sdpa_kernel(kinds):
                    yield
            finally:
                for name, value in zip(names, before, strict=True):
                    setattr(products, name, value)

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _check(self, ids: Tensor, first: int, cache: Tensor) -> None:
        want = (*self._scratch.shape[:4], self.spec.head_dim)
        if (*cache.shape[:4], *cache.shape[5:]) != want or cache.dtype != self._scratch.dtype:
            raise ModelError(
                f"the cache is {cache.dtype} {tuple(cache.shape)}: library prefill wants "
                f"{self._scratch.dtype} [{', '.join(map(str, want[:4]))}, positions, {want[4]}]"
            )
        end, room = first + len(ids), min(self.max_context, cache.shape[4])
        if first < 0 or end > room:
            raise RequestError(f"positions {first} to {end - 1} do not fit a cache of {room}")
        for token in (int(ids.min()), int(ids.max())):
            if not 0 <= token < self.spec.vocab_size:
                raise RequestError(
                    f"token id {token} is outside the vocabulary of {self.spec.vocab_size}"
                )
