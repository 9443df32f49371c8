"""The kernels of one token, which a first start has to wait for: until one is compiled, another that makes a token and
no more (`Layout.tokens_only`) serves the requests that ask for no more.

`choose` (include/kog/choose.h) takes a fifth of decode.cu's time in the compiler and half of head_steps.cu's
(benchmarks/cuda-log.md#early). Both kernels of a source compile side by side; the one with `choose` takes over as
soon as it is there, and is the only one where it was kept or where cores are few.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kog_triton.backends.compile_log import waited_for
from kog_triton.backends.cuda.compilers import LEAST_CORES
from kog_triton.backends.cuda.jit import is_kept
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.request_words import OFFSETS, WANTS_MORE

if TYPE_CHECKING:
    import numpy as np

    from kog_triton.backends.cuda.compilers import Background
    from kog_triton.backends.cuda.rank_kernel import RankKernel


def tokens_only(source: str, layout: Layout) -> Layout | None:
    """The layout of the kernel that is compiled to be there sooner; None where there is to be none. DeviceError if
    there is no compiler."""
    if len(os.sched_getaffinity(0)) < LEAST_CORES:
        return None
    if is_kept(render(layout), source, layout.lowering.gpu.arch):
        return None
    return replace(layout, tokens_only=True)


class OneToken:
    """The kernel of one token that is made of a source, and the early one until that is there.

    compile  puts a layout's kernel where `load` finds it; DeviceError if it cannot
    load     makes it ready to run; by the thread that launches
    """

    def __init__(
        self,
        source: str,
        layout: Layout,
        early: Layout | None,
        compile: Callable[[str, Layout], object],
        load: Callable[[Layout], "RankKernel"],
        beside: "Background",
    ) -> None:
        self._source, self._layout, self._early, self._load = source, layout, early, load
        self._soon: Future[object] | None = None
        if early is not None:
            self._soon = beside.submit(compile, source, early)
        self._compiled: Future[object] = beside.submit(compile, source, layout)
        self._loaded: dict[bool, RankKernel] = {}  # by whether it is the whole one

    @property
    def early(self) -> bool:
        """Whether another one is there sooner."""
        return self._soon is not None

    def take(self, more: bool = True) -> "RankKernel":
        """A kernel for requests of which some want `more` of their logits than a token, or none does; it is waited
        for. DeviceError in the compiler's words if it refuses."""
        if not more and self._soon is not None and not self._compiled.done():
            self._wait(self._soon)
            return self._open(False)
        self._wait(self._compiled)
        return self._open(True)

    def settle(self) -> None:
        """Wait for all that compiles."""
        for future in filter(None, (self._soon, self._compiled)):
            future.result()

    def _wait(self, compiled: "Future[object]") -> None:
        if not compiled.done():
            with waited_for(self._source):
                compiled.result()
        compiled.result()

    def _open(self, whole: bool) -> "RankKernel":
        if whole not in self._loaded:
            layout = self._layout if whole else self._early
            assert layout is not None
            self._loaded[whole] = self._load(layout)
        return self._loaded[whole]


class FirstKernels:
    """The kernels that serve requests one by one: of steps, and where a library runs prompts of first tokens.

    early    whether others may be there sooner
    compile  as for OneToken
    open     makes a kernel ready to run, of a source, its entry point and a layout
    """

    def __init__(
        self,
        layout: Layout,
        heads: bool,
        early: bool,
        compile: Callable[[str, Layout], object],
        open: Callable[[str, str, Layout], "RankKernel"],
        beside: "Background",
    ) -> None:
        def one(source: str, entry: str) -> OneToken:
            soon = tokens_only(source, layout) if early else None
            return OneToken(source, layout, soon, compile, partial(open, source, entry), beside)

        self.decode = one("decode.cu", "kog_decode")
        self.heads = one("head_steps.cu", "kog_head_steps") if heads else None
        self._more: dict[int, bool] = {}  # by slot

    def wait(self) -> None:
        """Until a first token can be made; for all where nothing comes sooner."""
        first = self.heads or self.decode
        first.take(more=not first.early)
        if not self.decode.early:
            self.decode.take()

    def note(self, slot: int, words: "np.ndarray") -> None:
        """What the request of a slot wants, by its words."""
        self._more[slot] = bool(words[OFFSETS["flags"]] & WANTS_MORE)

    def want_more(self, slots: Sequence[int]) -> bool:
        """Whether the request of one of the slots wants more than tokens."""
        return any(self._more[slot] for slot in slots)

    def of_steps(self, slots: Sequence[int]) -> "RankKernel":
        """For the requests of slots."""
        return self.decode.take(self.want_more(slots))

    def of_heads(self, slots: Sequence[int]) -> "RankKernel":
        """As `of_steps`, of first tokens."""
        assert self.heads is not None, "no library has run a prompt"
        return self.heads.take(self.want_more(slots))

    def settle(self) -> None:
        """Wait for all that compiles."""
        for one in filter(None, (self.decode, self.heads)):
            one.settle()
