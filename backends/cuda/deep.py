"""The kernel of one token for deep positions (`Layout.deep`, include/kog/deep.h): the same bits as the other kernel's,
in less time from LEAST positions on. It compiles beside what runs, from when a model with so long a context is opened
or a request first gets so deep; the other kernel serves until it is there.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kog_triton.backends.compiled_beside import CompiledBeside
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.errors import DeviceError

if TYPE_CHECKING:
    from kog_triton.backends.cuda.rank_kernel import RankKernel

# Positions of the deepest request of a launch. Its time over the other kernel's, on an H200: 0.97 to 1.00 at 1,024,
# 1.00 to 1.02 at 256 (benchmarks/cuda-log.md#deep-kernel).
LEAST = 1024
NAME = "deep positions"  # for the log


def deep_layout(layout: Layout, least: int = LEAST) -> Layout | None:
    """None for a model whose context ends ahead of `least` positions."""
    return replace(layout, deep=True) if layout.max_context > least else None


class DeepKernel:
    """The kernel of deep positions of one model, and whether it is there.

    layout   None: there is to be none
    least    positions from which on it serves
    build    puts a layout's kernel where `load` finds it; DeviceError if it cannot
    load     makes it ready to run; by the thread that launches
    """

    def __init__(
        self,
        layout: Layout | None,
        build: Callable[[Layout], object],
        load: Callable[[Layout], "RankKernel"],
        least: int = LEAST,
    ) -> None:
        self._layout, self._load, self._least = layout, load, least
        self._compiled: CompiledBeside[str] = CompiledBeside(
            lambda _: build(self._of()), str, "the kernel of one token serves them"
        )
        self._kernel: RankKernel | None = None

    def begin(self) -> None:
        """Begin to compile it."""
        if self._layout is not None:
            self._compiled.begin(NAME)

    def ready(self, position: int) -> bool:
        """Whether this kernel is to serve a launch whose deepest request stands at a position, and is compiled; from
        then on it compiles."""
        deep = self._layout is not None and position >= self._least
        return deep and self._compiled.ready(NAME)

    def take(self) -> "RankKernel | None":
        """The kernel, which is `ready`; None if it cannot be loaded."""
        if self._kernel is None:
            try:
                self._kernel = self._load(self._of())
            except DeviceError as error:
                self._compiled.give_up(NAME, error)
        return self._kernel

    def _of(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def wait(self, position: int) -> "RankKernel | None":
        """The kernel for a request at a position, waited for if it is this one; None if it is the other."""
        if position >= self._least and not self.ready(position):
            self.settle()
        return self.take() if self.ready(position) else None

    def settle(self) -> None:
        """Wait for what compiles."""
        self._compiled.settle()

    def close(self) -> None:
        self._kernel = None
