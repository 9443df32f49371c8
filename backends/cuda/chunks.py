"""Prompts in chunks: several positions of one request a step of the CUDA kernel (include/kog/columns/chunk.h).

A chunk reads the weights once for all its positions, and leaves the keys and values that a token at a time
leaves, bit for bit. The launch ends with the prompt's first token; the kernel of one token goes on. What cannot
take part is refused by name: its prompts go a token at a time, on that kernel alone.
"""

import logging
import threading
from collections.abc import Callable

import torch
from kog_triton.backends.cuda.columns import ColumnKernel, lay_out_columns, make_kernel
from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.header import Layout

from kog_triton.backends.library_prefill import Crossover
from kog_triton.errors import ModelError
from kog_triton.schedule.cuda import CudaLowering

log = logging.getLogger(__name__)
POSITIONS = 8  # of a chunk
# Tokens of a prompt that pay for a launch of their own. Fewer take the kernel of one token, so that the whole
# request is one launch.
CHUNKS_FROM = 3
# XXX
CHUNKED = Crossover(17, 33)
# Chunks after which a launch ends, so that a cancel is heard: 35 ms of a 1B model.
MOST_CHUNKS = 32


class Chunks:
    """The kernel of one model's prompts, compiled by a thread of its own while the weights are packed.

    positions  of a step; 0 for no such kernel
    compile    puts a layout's kernel where `load` finds it
    load       makes it ready to run; by the thread that launches
    """

    def __init__(
        self,
        lowering: CudaLowering,
        max_context: int,
        positions: int,
        compile: Callable[[Layout], object],
        load: Callable[[Layout], Kernel],
    ) -> None:
        self._compile, self._load = compile, load
        self._layout: Layout | None = None
        self._kernel: ColumnKernel | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        if not positions:
            return
        try:
            self._layout = lay_out_columns(lowering, max_context, positions, chunk=True)
        except ModelError as error:
            log.info("prompts run a token at a time: %s", error)
            return
        self._thread.start()

    def wait(self) -> None:
        """Until it is compiled. Where the compiler fails the log says so."""
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def exist(self) -> bool:
        """Whether there is such a kernel, once it has been waited for."""
        return self._layout is not None

    def pay(self, tokens: int) -> bool:
        """Whether so many tokens that a prompt has left are for this kernel."""
        return self.exist and tokens >= CHUNKS_FROM

    def take(self, device: torch.device) -> ColumnKernel:
        """The kernel, which `exist`s, with memory of its own."""
        assert self._layout is not None
        if self._kernel is None:
            self._kernel = make_kernel(self._layout, self._load(self._layout), device)
        return self._kernel

    def memory_bytes(self) -> int:
        return 0 if self._kernel is None else self._kernel.nbytes

    def close(self) -> None:
        """Wait for what compiles: a thread inside the compiler must not outlive Python."""
        self.wait()
        self._kernel = None

    def _run(self) -> None:
        assert self._layout is not None
        try:
            self._compile(self._layout)
        except Exception as error:
            log.warning("no kernel of chunks, prompts run a token at a time: %s", error)
            self._layout = None
