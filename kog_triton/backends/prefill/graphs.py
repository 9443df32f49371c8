"""CUDA graphs of whole passes: one call of the host each, where kernels launched one by one take it longer than the
GPU."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from kog_triton.errors import first_line

log = logging.getLogger(__name__)


class Graphed(NamedTuple):
    """A pass of so many tokens, padding included."""

    kind: str
    size: int


class PassGraphs:
    """Captured one at a time, once nobody waits; until then, and where memory is short, its passes run eagerly, which
    takes a short one longer (benchmarks/cuda-log.md#library-prefill).

    passes  the first of them needs most memory; on a CPU none is captured
    nbytes  of what graphs run in, cuBLAS's workspaces among it
    """

    def __init__(self, device: torch.device, passes: Sequence[Graphed]) -> None:
        self._device = device
        self._to_capture = list(passes) if device.type == "cuda" else []
        self._graphs: dict[Graphed, torch.cuda.CUDAGraph] = {}
        self.nbytes = 0

    def __contains__(self, wanted: Graphed) -> bool:
        """Whether it was captured."""
        return wanted in self._graphs

    def replay(self, wanted: Graphed) -> None:
        self._graphs[wanted].replay()

    def make_ready(
        self,
        empty: Callable[[], None],
        run: Callable[[Graphed], None],
        settings: Callable[[str], AbstractContextManager[None]],
    ) -> bool:
        """Capture one more; whether there may be others.

        empty     has the next pass write nothing that anybody reads
        run       queues a pass
        settings  what holds meanwhile, by the pass's kind
        """
        if not self._to_capture:
            return False
        wanted = self._to_capture.pop(0)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        try:
            with settings(wanted.kind):
                empty()
                self._capture(wanted, run)
        except torch.OutOfMemoryError as error:
            self._to_capture.clear()
            log.warning("no graph of a %s of %d tokens: %s", *wanted, first_line(error))
        torch.cuda.empty_cache()
        self.nbytes += max(torch.cuda.memory_reserved(self._device) - before, 0)
        return bool(self._to_capture)

    def _capture(self, wanted: Graphed, run: Callable[[Graphed], None]) -> None:
        # Makes what libraries make at their first call, which no graph can hold. On no other stream: cuBLAS keeps a
        # workspace a stream, of 32 MiB on an H100.
        run(wanted)
        graph = torch.cuda.CUDAGraph()
        # Graphs run one after another and nothing in their memory outlives a replay: they share it.
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run(wanted)
        self._graphs[wanted] = graph
