"""The layout of a kernel of several token columns: one step serves as many requests.

It reads the same weight stream as the kernel of one token. Regions of words have a row a lane and column, or
hold the operands of all columns of a lane as warps read them (include/kog/columns/operands.h); flags have a word
a unit. Activations that outgrow shared memory are refused: then fewer requests share a step, and without any
kernel of columns they take turns, a token each, on the kernel of one token.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from kog_triton.backends.cuda import lanes
from kog_triton.backends.cuda.attention import attention_bytes
from kog_triton.backends.cuda.batches import COLUMN_SMALL_BYTES, finished_pieces, up
from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.layout import (
    FLAGS_TOGETHER,
    LINE_WORDS,
    PARTIAL_BYTES,
    Layout,
    Region,
    add_head_regions,
    add_region,
    add_split_regions,
    check_model,
)

from kog_triton.errors import DeviceError, ModelError
from kog_triton.model.spec import Head
from kog_triton.schedule.cuda import WINDOW_BYTES, CudaLowering
from kog_triton.schedule.lowering import matrix_stages

log = logging.getLogger(__name__)
COUNTS = (2, 4, 8)  # columns that kernels are made for


def lay_out_columns(
    lowering: CudaLowering, max_context: int, columns: int, chunk: bool = False
) -> Layout:
    """Regions and shared memory for `columns` (COUNTS) requests a step, or positions of one prompt if it is a
    `chunk`; ModelError if they do not fit."""
    check_model(lowering)
    schedule, spec = lowering.schedule, lowering.schedule.spec
    shards = schedule.num_shards
    stages = {stage.name: stage for stage in matrix_stages(schedule)}
    group = lowering.group_size(stages["qkv_proj"])
    splits = max(1, group // spec.lane_kv_heads)
    regions: dict[str, Region] = {}

    def add(name: str, width: int, rows: int = 1, buffers: int = 1) -> None:
        """`rows` a lane."""
        add_region(regions, name, width, shards * rows, buffers)

    add("qkv", -(-schedule.exchange("qkv").width // 2), columns)
    for name, stage in (("attention", "o_proj"), ("mlp", "down_proj")):
        add(name, lowering.padded_k(stages[stage]) // 2 * columns)
    add("attention_heads", spec.lane_heads * columns)
    heads = spec.lane_kv_heads * columns
    add_split_regions(regions, spec, shards * heads, splits)
    add("attention_flags", heads * splits)
    for name, reduces in (
        ("attention_out", spec.reduce_attention),
        ("mlp_out", spec.reduce_mlp),
    ):
        add(name, spec.hidden_size, columns)
        add(name + "_flags", -(-spec.hidden_size // 4))
        buffers = lanes.num_buffers(reduces, spec.delay) if shards > 1 else 0
        add(name + "_sent", spec.hidden_size if buffers else 0, columns, max(1, buffers))
    add("mlp_flags", -(-group // FLAGS_TOGETHER) * LINE_WORDS)
    mixed = spec.hidden_size if shards > 1 and spec.head is not Head.VOCAB_PARALLEL else 0
    add("part", mixed, columns)
    add_region(regions, "y", mixed, columns)
    add_region(regions, "y_flags", -(-mixed // 4))
    add_region(regions, "column_best", 4 * 2 * lowering.num_blocks * columns)
    add_region(regions, "column_winner", 2 * 2 * columns)
    add_head_regions(regions, lowering.num_blocks)
    layout = Layout(
        lowering,
        max_context,
        regions,
        splits,
        scratch_bytes=0,
        ring_chunks=0,
        columns=columns,
        chunk=chunk,
        partial_bytes=0,
        small_bytes=COLUMN_SMALL_BYTES,
    )
    behind = layout.stage_bytes(stages["o_proj"]) + max(
        attention_bytes(spec, splits, layout.new_rows),
        layout.head_places["end"],
    )
    rooms = [PARTIAL_BYTES, behind, *(layout.stage_bytes(s) for s in stages.values())]
    if lanes.shares(spec):
        # Beside all that o_proj and down_proj keep, where x is staged for other stages.
        at = up(max(behind, layout.stage_bytes(stages["down_proj"])), 128)
        joined = max(finished_pieces(lowering, stages[s], columns) for s in ("o_proj", "down_proj"))
        layout = replace(layout, joined_at=at)
        rooms.append(at + joined * 32 * 4)
    scratch = up(max(rooms), 128)
    free = lowering.gpu.shared_bytes - scratch - COLUMN_SMALL_BYTES
    ring = free // (lowering.chunk_bytes + 16)
    window = lowering.chunks_of(WINDOW_BYTES)
    if ring < window:
        raise ModelError(
            f"{scratch} bytes of activations of {columns} requests leave {ring} chunks of shared memory: "
            f"{window} are needed"
        )
    return replace(layout, scratch_bytes=scratch, ring_chunks=ring)


@dataclass(frozen=True)
class ColumnKernel:
    """A kernel of several columns that is ready to run, with memory of its own layout."""

    layout: Layout
    kernel: Kernel
    words: torch.Tensor
    scores: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scores.nbytes


def make_kernel(layout: Layout, kernel: Kernel, device: torch.device) -> ColumnKernel:
    vocab = layout.lowering.schedule.spec.vocab_size
    words = torch.zeros(layout.total_words, dtype=torch.int32, device=device)
    return ColumnKernel(
        layout, kernel, words, torch.zeros(1 + layout.columns, vocab, device=device)
    )


class Columns:
    """The kernels of several columns of one model: compiled in a thread of their own when they are first
    wanted, so that requests that run meanwhile take turns instead of waiting. If that fails, or one cannot
    be loaded, the log says so and they go on taking turns.

    compile  puts a layout's kernel where `load` finds it; DeviceError if it cannot
    load     makes it ready to run; by the thread that launches
    """

    def __init__(
        self,
        lowering: CudaLowering,
        max_context: int,
        counts: Sequence[int],
        compile: Callable[[Layout], object],
        load: Callable[[Layout], Kernel],
    ) -> None:
        self._compile, self._load = compile, load
        self._layouts: dict[int, Layout] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._failed: set[int] = set()
        self._kernels: dict[int, ColumnKernel] = {}
        for count in counts:
            try:
                self._layouts[count] = lay_out_columns(lowering, max_context, count)
            except ModelError as error:
                log.info("no kernel of %d columns: %s", count, error)
                break

    @property
    def counts(self) -> tuple[int, ...]:
        """Columns of the kernels that this model can have."""
        return tuple(self._layouts)

    @property
    def most(self) -> int:
        """Requests that a step serves at most; 1 if there is no kernel of columns."""
        return max(self._layouts, default=1)

    def ready(self, requests: int) -> bool:
        """Whether so many requests can share a launch; begins to compile what that takes."""
        if requests < 2 or not self._layouts:
            return False
        count = self._count(requests)
        if count not in self._threads:
            # No daemon: inside the compiler it must not outlive Python, though nobody calls close().
            self._threads[count] = threading.Thread(target=self._run, args=(count,))
            self._threads[count].start()
        return not self._threads[count].is_alive() and count not in self._failed

    def take(self, requests: int, device: torch.device) -> ColumnKernel | None:
        """The kernel of the fewest columns that hold so many requests, which is `ready`; None if it cannot be
        loaded."""
        count = self._count(requests)
        if count not in self._kernels:
            layout = self._layouts[count]
            try:
                self._kernels[count] = make_kernel(layout, self._load(layout), device)
            except (DeviceError, torch.OutOfMemoryError) as error:
                self._give_up(count, error)
        return self._kernels.get(count)

    @property
    def kernels(self) -> tuple[ColumnKernel, ...]:
        """Those in use."""
        return tuple(self._kernels.values())

    def settle(self) -> None:
        """Wait for what compiles."""
        for thread in self._threads.values():
            thread.join()

    def close(self) -> None:
        self.settle()
        self._kernels.clear()

    def memory_bytes(self) -> int:
        return sum(k.nbytes for k in self.kernels)

    def _count(self, requests: int) -> int:
        return next(c for c in self._layouts if c >= min(requests, self.most))

    def _run(self, count: int) -> None:
        begun = time.perf_counter()
        log.info(
            "compiling the kernel of %d columns; until it is there, requests take turns", count
        )
        try:
            self._compile(self._layouts[count])
        except Exception as error:
            self._give_up(count, error)
            return
        log.info("the kernel of %d columns took %.1f s", count, time.perf_counter() - begun)

    def _give_up(self, count: int, error: Exception) -> None:
        log.warning("no kernel of %d columns, requests take turns: %s", count, error)
        self._failed.add(count)
