"""The HIP kernel of a model: compiled by clang for gfx942, launched in the executor in the place of a GPU."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kog_triton.backends.cuda import memory
from kog_triton.backends.cuda.launcher import UNLIMITED
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.protocol import TENSORS
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS, Gpu
from tests import ROOT
from tests.lib.cuda_walk import Walk, changed, write_request
from tests.lib.gfx942.backends import CLANG, text_object
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.executor import AGENT, PLAIN, SYSTEM, Buffer, Execution, Kernel, Launch, Memory, round_robin

KERNEL = "kog_decode"
INCLUDES = tuple(ROOT / "backends" / vendor / "include" for vendor in ("hip", "cuda"))
WAVE = 64
UNLIMITED_NS = 1 << 40  # of a wait
# With the host while the kernel runs, and what blocks exchange: nothing there may be touched with a narrower scope.
LEAST = dict.fromkeys(("mailbox", "outbox", "masks", "logprobs"), SYSTEM) | {"words": AGENT, "error": AGENT}
PAIRS = ("mailbox", "outbox")  # store_system_pair


def layout_of(
    spec: ModelSpec, num_blocks: int = 0, max_context: int = 64, gpu: Gpu = GPUS["mi300x"], ranks: int = 1
) -> Layout:
    return lay_out_hip(lower_hip(build(spec, ranks), gpu, num_blocks), max_context)


@cache
def compiled(layout_text: str, includes: tuple[Path, ...] = INCLUDES, compiler: str = CLANG) -> CodeObject:
    """The kernel behind a layout's header (`render`)."""
    text = layout_text + (ROOT / "backends/hip/decode.hip").read_text()
    return text_object(text, includes, compiler)


class HipWalk(Walk):
    """One model, one slot; `run` gives the instructions that a launch took."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Any,
        num_blocks: int = 0,
        max_context: int = 64,
        includes: tuple[Path, ...] = INCLUDES,
        compiler: str = CLANG,
        gpu: Gpu = GPUS["mi300x"],
        **changes: int,
    ) -> None:
        self.spec, self.layout = spec, layout_of(spec, num_blocks, max_context, gpu)
        text = changed(render(self.layout), **changes)
        self.kernel = Kernel(compiled(text, includes, compiler), KERNEL)
        self.memory = memory.allocate(self.layout, weights, 1, torch.device("cpu"))
        self.conditions: dict[str, Any] = {}
        self.last: Execution | None = None

    def run(self, request, prompt, seed=0, limit=UNLIMITED_NS, logits=None, control=0):  # type: ignore[no-untyped-def]
        others = write_request(self.memory, request, prompt, logits, control)
        pointers = self.memory.pointers([0], limit, UNLIMITED, **others)
        tensors = {name: getattr(self.memory, name) for name in TENSORS} | others
        self.last = launch(self.kernel, self.layout, pointers, tensors, seed=seed, **self.conditions)
        return self.last.steps


def launch(
    kernel: Kernel,
    layout: Layout,
    argument: ctypes.Structure,
    tensors: dict[str, torch.Tensor],
    memory: Memory = PLAIN,
    seed: int = 0,
    xcc: Callable[[int], int] = round_robin,
    **options: Any,
) -> Execution:
    """One launch, of the blocks that the layout has."""
    buffers = [
        Buffer(t, LEAST.get(name) == SYSTEM, LEAST.get(name, 0), name in PAIRS)
        for name, t in tensors.items()
        if t.numel()
    ]
    grid = (layout.lowering.num_blocks, 1, 1)
    one = Launch([bytes(argument)], grid, (WAVE, layout.threads // WAVE, 1))
    return kernel.run(one, buffers, memory, seed, layout.shared_bytes, xcc, **options)
