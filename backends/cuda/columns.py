"""Kernels of several token columns: compiled beside the requests that wait for none, then loaded and kept.

A model whose columns outgrow shared memory has none (layout/columns.py): fewer requests share a step, and without
any kernel of columns they take turns, a token each, on the kernel of one token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kog_triton.backends.compiled_beside import CompiledBeside
from kog_triton.backends.cuda.layout.columns import LayOut, layouts_of_slots
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.rank_kernel import RankKernel
from kog_triton.errors import DeviceError
from kog_triton.schedule.cuda import CudaLowering


@dataclass(frozen=True)
class ColumnKernel:
    """A kernel of several columns that is ready to run, with memory of its own layout: a tensor a rank."""

    layout: Layout
    kernel: RankKernel
    words: Sequence[torch.Tensor]
    scores: Sequence[torch.Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.words, *self.scores))


def make_kernel(layout: Layout, kernel: RankKernel, devices: Sequence[torch.device]) -> ColumnKernel:
    size, vocab = layout.total_words, layout.lowering.schedule.spec.vocab_size
    words = [torch.zeros(size, dtype=torch.int32, device=d) for d in devices]
    scores = [torch.zeros(1 + layout.columns, vocab, device=d) for d in devices]
    return ColumnKernel(layout, kernel, words, scores)


MakeKernel = Callable[[Layout, RankKernel, Sequence[torch.device]], ColumnKernel]


class Columns:
    """The kernels of several columns of one model: compiled beside what runs, when `begin` is called or they are first
    wanted, so that requests that run meanwhile take turns instead of waiting. If that fails, or one cannot
    be loaded, the log says so and they go on taking turns.

    counts   of the columns that there may be, ascending
    compile  puts a layout's kernel where `load` finds it; DeviceError if it cannot
    load     makes it ready to run; by the thread that launches
    lay_out  lays out a count's kernel, if not as CUDA's
    make     gives it memory
    """

    def __init__(
        self,
        lowering: CudaLowering,
        max_context: int,
        counts: Sequence[int],
        num_slots: int,
        compile: Callable[[Layout], object],
        load: Callable[[Layout], RankKernel],
        what: str = "columns",
        lay_out: LayOut | None = None,
        make: MakeKernel = make_kernel,
    ) -> None:
        self._compile, self._load, self._make = compile, load, make
        self._layouts = layouts_of_slots(lowering, max_context, counts, num_slots, lay_out)
        self._compiled: CompiledBeside[int] = CompiledBeside(
            lambda count: self._compile(self._layouts[count]), lambda count: f"{count} {what}"
        )
        self._kernels: dict[int, ColumnKernel] = {}

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
        return self._compiled.ready(self._count(requests))

    def begin(self) -> None:
        """Begin to compile all of them."""
        for count in self._layouts:
            self._compiled.begin(count)

    def take(self, requests: int, devices: Sequence[torch.device]) -> ColumnKernel | None:
        """The kernel of the fewest columns that hold so many requests, which is `ready`; None if it cannot be
        loaded."""
        count = self._count(requests)
        if count not in self._kernels:
            layout = self._layouts[count]
            try:
                self._kernels[count] = self._make(layout, self._load(layout), devices)
            except (DeviceError, torch.OutOfMemoryError) as error:
                self._compiled.give_up(count, error)
        return self._kernels.get(count)

    @property
    def kernels(self) -> tuple[ColumnKernel, ...]:
        """Those in use."""
        return tuple(self._kernels.values())

    def settle(self) -> None:
        """Wait for what compiles."""
        self._compiled.settle()

    def close(self) -> None:
        self._kernels.clear()

    def memory_bytes(self) -> int:
        return sum(k.nbytes for k in self.kernels)

    def _count(self, requests: int) -> int:
        return next(c for c in self._layouts if c >= min(requests, self.most))
