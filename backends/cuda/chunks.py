"""Prompts in chunks: several positions of one request a step of the CUDA kernel (include/kog/columns/chunk.h).

A chunk reads the weights once for all its positions, and leaves the keys and values that a token at a time
leaves, bit for bit. The launch ends with the prompt's first token; the kernel of one token goes on. A model whose
activations of eight positions outgrow shared memory gets chunks of fewer. What cannot take part is refused by name:
its prompts go a token at a time, on that kernel alone; so do prompts that come before the compiler is done.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from kog_triton.backends.cuda.columns import ColumnKernel, MakeKernel, make_kernel
from kog_triton.backends.cuda.layout.columns import POSITIONS, LayOut, layout_of_chunks
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.rank_kernel import RankKernel
from kog_triton.backends.prefill.library import BY_TOKEN, Crossover
from kog_triton.errors import DeviceError
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.scaling import SHARE

log = logging.getLogger(__name__)
# Tokens of a prompt that pay for a launch of their own. Fewer take the kernel of one token, so that the whole
# request is one launch.
CHUNKS_FROM = 3
# For `--prefill auto`, of chunks of eight: times to the first token of Llama-3.2-1B on one H200 in
# development runs (benchmarks/cuda-log.md#prompts): 8 tokens 1.38 ms for the library's 1.90, 9 tokens 2.09
# for 1.90; behind 200 cached ones, 48 tokens 5.4 for 6.0, behind 2,000 ones 6.6 for 6.0. A chunk takes 0.71
# ms; behind 1,600 positions 0.92, behind 2,200 1.64. All of it was measured while joins began at 2,048
# positions (layout/attention.py).
CHUNKED = Crossover(8, 48)
# For models with lanes, by Laneformer-2B in fp16, development runs: 8 tokens 2.00 ms for the library's 3.04,
# 9 tokens 3.64 for 3.05; behind 200 cached ones, 16 tokens 4.4 for 11.1, 32 tokens 8.2 for 6.8, behind 800 ones 4.7 and
# 9.2 for 6.9.
CHUNKED_LANES = Crossover(8, 24)
# On several GPUs, seconds of a layer: of a pass behind a cached prefix, which is eager and queued for each GPU in turn,
# for two; of a fresh prompt's graph of 128 tokens, an estimate; and of a chunk, beside its bytes. Measured on two H200s
# (benchmarks/cuda-log.md#rank-passes) with 16-bit weights: 18 to 20 ms of Llama-3.2-1B alone and 38 to 40 of Qwen3-8B
# by the host; chunks 0.52 and 2.4 ms, of Laneformer-2B 0.84. For narrow weights an estimate.
RANKS_LAYER_S, GRAPH_LAYER_S, CHUNK_LAYER_S = 1.15e-3, 0.25e-3, 16e-6
# Of narrow weights: Qwen3-8B int4 and FP8 and Llama-3.2-1B on one H200 (benchmarks/cuda-log.md#narrow-prompts).
CHUNKED_NARROW = Crossover(16, 24)
# Chunks after which a launch ends, so that a cancel is heard: 25 to 50 ms of a 1B model, and a pass over
# the weights each of a larger one.
MOST_CHUNKS = 32


def crossover_of_ranks(lowering: CudaLowering, graphs: bool) -> Crossover:
    """Tokens whose chunks of POSITIONS take as long as a pass of the library: a fresh prompt's by `graphs`, or else
    what the host takes to queue it on two GPUs, and on more as many times longer as they are more."""
    schedule = lowering.schedule
    layers, ranks = schedule.spec.num_layers, schedule.num_ranks
    read = max(lowering.stream_bytes(rank) for rank in range(ranks))
    chunk_s = read / (SHARE * lowering.gpu.bandwidth) + layers * CHUNK_LAYER_S
    queued = layers * RANKS_LAYER_S * ranks / 2
    fresh = layers * GRAPH_LAYER_S if graphs else queued
    tokens = (int(POSITIONS * seconds / chunk_s) for seconds in (fresh, queued))
    return Crossover(*tokens)


class Submits(Protocol):
    """Begins work beside the caller; compilers.Background is one, every executor another."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any) -> Future[Any]: ...


class Chunks:
    """The kernel of one model's prompts. No request waits for its compiler.

    positions  of a step at most; 0 for no such kernel
    compiler   where it is compiled
    compile    puts a layout's kernel where `load` finds it
    load       makes it ready to run; by the thread that launches, or that settles while nothing runs
    graphs     on several GPUs: fresh prompts of the library are graphs
    lay_out    lays the kernel out, if not as CUDA's
    kernel     None until it is compiled and then asked for, and where there is none
    gave_up    it could not be compiled or loaded
    """

    kernel: ColumnKernel | None = None
    gave_up = False
    _compiled: Future[None] | None = None  # until the kernel is there

    def __init__(
        self,
        lowering: CudaLowering,
        max_context: int,
        positions: int,
        compiler: Submits,
        compile: Callable[[Layout], object],
        load: Callable[[Layout], RankKernel],
        graphs: bool = False,
        lay_out: LayOut | None = None,
        make: MakeKernel = make_kernel,
    ) -> None:
        self._compile, self._load, self._graphs, self._make = compile, load, graphs, make
        self._layout = layout_of_chunks(lowering, max_context, positions, lay_out)
        if self._layout is not None:
            self._compiled = compiler.submit(self._run, self._layout)

    def settle(self, devices: Sequence[torch.device]) -> None:
        """Wait for the compiler and load the kernel. Where one of them fails the log says so."""
        compiled, self._compiled = self._compiled, None
        if compiled is None:
            return
        compiled.result()
        if self._layout is None:
            return
        try:
            self.kernel = self._make(self._layout, self._load(self._layout), devices)
        except (DeviceError, torch.OutOfMemoryError) as error:
            self._give_up(error)

    def for_prompt(self, tokens: int, devices: Sequence[torch.device]) -> ColumnKernel | None:
        """The kernel, if it is there by now and for so many tokens that a prompt has left."""
        if tokens < CHUNKS_FROM:
            return None
        if self._compiled is not None and self._compiled.done():
            self.settle(devices)
        return self.kernel

    def close(self) -> None:
        """Let go of the kernel; one that is still compiled is not waited for."""
        self.kernel = self._layout = self._compiled = None

    @property
    def crossover(self) -> Crossover:
        """From which prompts on "auto" means the library: the same before the kernel is there, so that a
        prompt's numbers do not depend on when it comes, unless it never does.

        Only chunks of POSITIONS were timed. One of fewer takes no longer, and no less than a token: the
        library is taken to be worth as many of them, and no fewer tokens than one at a time.
        """
        layout = self._layout
        if layout is None:
            return BY_TOKEN
        if layout.lowering.schedule.num_ranks > 1:
            return self._crossover(crossover_of_ranks(layout.lowering, self._graphs))
        return self.crossover_of_passes

    @property
    def crossover_of_passes(self) -> Crossover:
        """From how many tokens on a prompt that may share a pass of short prompts leaves the kernel; on several GPUs
        as on one, an estimate."""
        layout = self._layout
        if layout is None:
            return BY_TOKEN
        spec = layout.lowering.schedule.spec
        if spec.narrow:
            return self._crossover(CHUNKED_NARROW)
        return self._crossover(CHUNKED_LANES if spec.num_lanes > 1 else CHUNKED)

    def _crossover(self, timed: Crossover) -> Crossover:
        columns = POSITIONS if self._layout is None else self._layout.columns
        fresh, behind = (n * columns // POSITIONS for n in (timed.fresh, timed.behind))
        return Crossover(max(fresh, BY_TOKEN.fresh), max(behind, BY_TOKEN.behind))

    def memory_bytes(self) -> int:
        return 0 if self.kernel is None else self.kernel.nbytes

    def _run(self, layout: Layout) -> None:
        try:
            self._compile(layout)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        log.warning("no kernel of chunks, prompts run a token at a time: %s", error)
        self._layout, self.gave_up = None, True
