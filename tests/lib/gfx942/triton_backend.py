"""The Triton backend whose launches run in the executor: the machine code for gfx942 in place of a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Failure, Mailbox, Request, Step
from kog_triton.backends.triton import TritonBackend
from kog_triton.backends.triton.host import backend as host_backend
from kog_triton.backends.triton.host.backend import SECOND_NAMES
from kog_triton.backends.triton.host.shared_steps import SharedSteps
from tests.lib.gfx942.executor import AGENT, PLAIN, SYSTEM, Buffer, Kernel, Launch, Memory, round_robin
from tests.lib.gfx942.triton_cases import CONTEXT, SMALL, compiled
from tests.lib.lowering_cases import ArrayWeights

KERNEL = "decode_kernel"
# With the host, while the kernel runs; what blocks exchange. Nothing there may be touched with a narrower scope.
LEAST = {"mailbox": SYSTEM, "words": AGENT}
SCRATCH_POINTERS = 2  # that Triton adds to a kernel's arguments; these kernels use neither
LANES = 64


@dataclass
class Conditions:
    """What a launch meets: the memory, the seed of the schedule, which XCD a workgroup is on."""

    memory: Memory = PLAIN
    seed: int = 0
    xcc: Callable[[int], int] = round_robin


@cache
def decoded(case: str, variant: str) -> Kernel:
    return Kernel(compiled(case, variant).code_object, KERNEL)


class ExecutedBackend(TritonBackend):
    """`kernels` holds what ran, by variant; `steps` counts the instructions; `watch` is called while a kernel runs.

    touched   by variant, of the byte of an instruction, the pointers into whose memory it loaded or stored
    """

    def __init__(self, case: str, conditions: Conditions, num_slots: int = 1, limit: int | None = None) -> None:
        self.case, self.conditions = case, conditions
        self.kernels: dict[str, Kernel] = {}
        self.steps = 0
        self.touched: dict[str, dict[int, set[str]]] = {}
        self.watch: Callable[[], None] = lambda: None
        options = BackendOptions(max_context=CONTEXT, num_slots=num_slots)
        for_amd = host_backend.lower_tiles

        def lower(schedule: Any, blocks: int, context: int, vendor: str) -> Any:
            return for_amd(schedule, blocks, context, "amd")

        with patch.object(host_backend, "lower_tiles", lower):
            weights, blocks = ArrayWeights(SMALL[case].spec), SMALL[case].num_blocks
            super().__init__(weights, options, blocks, torch.device("cpu"))
        self.launcher.shared_steps = SharedSteps(1, None)
        if limit is not None:
            self.memory.pointers = self.memory.pointers._replace(limit=limit)

    def kernel(self, variant: str) -> Kernel:
        if variant not in self.kernels:
            self.kernels[variant] = decoded(self.case, variant).copy()
        return self.kernels[variant]

    def _launch(self, pointers: Any, rules: bool, chunks: bool, columns: int) -> Callable[[], bool]:
        assert columns == 1, "objects of one column are executed"
        pointers.words.copy_(self.memory.blank_words)
        pointers.error.copy_(self.memory.blank_error)
        variant = "+".join(name for name, on in (("rules", rules), ("chunks", chunks)) if on)
        made, kernel = compiled(self.case, variant), self.kernel(variant)
        named = [
            (name, t)
            for name, t in pointers._asdict().items()
            if name not in SECOND_NAMES and isinstance(t, torch.Tensor)
        ]
        buffers = [Buffer(t, LEAST.get(name) == SYSTEM, LEAST.get(name, 0)) for name, t in named]
        args = [t.data_ptr() if isinstance(t, torch.Tensor) else int(t) for t in pointers]
        launch = Launch([*args, *[0] * SCRATCH_POINTERS], (self.tiles.num_blocks, 1, 1), (LANES * made.num_warps, 1, 1))

        def host() -> None:
            self.watch()
            self.poll()

        c = self.conditions
        done = kernel.run(launch, buffers, c.memory, c.seed, made.lds, c.xcc, host=host)
        self.steps += done.steps
        seen = self.touched.setdefault(variant, {})
        for i in done.touched.nonzero()[0]:
            names = {name for k, (name, _) in enumerate(named) if done.touched[i] >> k & 1}
            seen.setdefault(int(kernel.records["at"][i]), set()).update(names)
        return lambda: True


def serve(backend: ExecutedBackend, *requests: Request) -> list[list[Step | Failure]]:
    """The steps of each request, all posted at once."""
    mailbox = Mailbox()
    for request in requests:
        mailbox.post(request)
    backend.generate(mailbox)
    return [mailbox.read(request.slot, 0) for request in requests]
