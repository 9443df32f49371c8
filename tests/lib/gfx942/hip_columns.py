"""The HIP kernel of several columns in the executor: a token of each of several requests a step."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kog_triton.backends.cuda.launcher import UNLIMITED
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.protocol import TENSORS
from kog_triton.backends.cuda.rank_memory import allocate_ranks
from kog_triton.backends.hip.column_layout import ColumnLayout, lay_out_columns
from kog_triton.backends.mailbox import Request
from kog_triton.backends.request_words import encode
from kog_triton.backends.token_words import Outcome, read_word
from kog_triton.errors import ModelError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests import ROOT
from tests.lib.cuda_walk import changed
from tests.lib.gfx942.backends import CLANG, text_object
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.executor import Execution, Kernel
from tests.lib.gfx942.hip_kernel import INCLUDES, UNLIMITED_NS, launch
from tests.lib.gfx942.hip_ranks import launch_ranks
from tests.lib.real_shapes import real_shape

KERNEL = "kog_columns"


def layout_of(
    spec: ModelSpec, columns: int, num_blocks: int = 0, max_context: int = 64, chunk: bool = False, gpus: int = 1
) -> ColumnLayout:
    lowering = lower_hip(build(spec, gpus), GPUS["mi300x"], num_blocks)
    return lay_out_columns(lowering, max_context, columns, chunk)


def most_columns(name: str, max_context: int, chunk: bool = False) -> ColumnLayout | None:
    """Of a named shape, with as many columns as fit; None if two do not."""
    for count in (8, 4, 2):
        try:
            return layout_of(real_shape(name), count, 0, max_context, chunk)
        except ModelError:
            continue
    return None


@cache
def compiled(layout_text: str, includes: tuple[Path, ...] = INCLUDES, compiler: str = CLANG) -> CodeObject:
    """The kernel behind a layout's header (`render`)."""
    text = layout_text + (ROOT / "backends/hip/columns.hip").read_text()
    return text_object(text, includes, compiler)


class HipColumns:
    """One model, as many slots as columns; on several simulated GPUs a rank each, the first of which has `memory`."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Any,
        columns: int,
        num_blocks: int = 0,
        includes: tuple[Path, ...] = INCLUDES,
        chunk: bool = False,
        compiler: str = CLANG,
        gpus: int = 1,
        **changes: int,
    ) -> None:
        self.spec = spec
        self.layout = layout_of(spec, columns, num_blocks, chunk=chunk, gpus=gpus)
        text = changed(render(self.layout), **changes)
        self.kernel = Kernel(compiled(text, includes, compiler), KERNEL)
        devices = [torch.device("cpu")] * gpus
        self.ranks = allocate_ranks(self.layout, weights, columns, devices)
        self.memory = self.ranks.first
        self.launches = 0
        self.last: Execution | None = None

    def serve(self, requests: Sequence[Request], seed: int = 1, **conditions: Any) -> list[tuple[list[int], Outcome]]:
        """Tokens and end of each request: launches until the last has ended. All begin together, but for one whose slot
        another has before it, which begins when that has ended."""
        for m in self.ranks.each:
            m.cache.fill_(torch.nan)  # a row that is read too early would be the last run's, the same
        waiting, running, self.launches = [*enumerate(requests)], dict[int, int](), 0
        made: dict[int, tuple[list[int], Outcome]] = {}
        while waiting or running:
            for number, one in [*waiting]:
                if one.slot not in running:
                    self._write(one)
                    running[one.slot] = number
                    waiting.remove((number, one))
            self._launch([*running], seed, conditions)
            ended = [slot for slot in running if self.told(slot)[1]]
            assert ended, "a launch ends with a request"
            made |= {running.pop(slot): self.told(slot) for slot in ended}
        return [made[number] for number in range(len(requests))]

    def prompt(self, request: Request, seed: int = 1, **conditions: Any) -> list[int]:
        """Of a kernel of chunks: what slot 0 has said behind the one launch that runs a prompt."""
        m, count = self.memory, self.layout.columns
        self._write(request)
        self._launch([0] * count, seed, conditions)
        assert int(m.mailbox[2]) == Outcome.YIELD
        assert m.states[0].tolist() == [len(request.prompt), self.told(0)[0][0]]
        return self.told(0)[0]

    def _write(self, request: Request) -> None:
        words = encode(request, self.spec.vocab_size)
        self.ranks.write_request(request.slot, words, request.prompt, 0)

    def _launch(self, slots: Sequence[int], seed: int, conditions: dict[str, Any]) -> None:
        for m in self.ranks.each:
            for tensor in (m.words, m.error, m.mailbox):
                tensor.zero_()
        each = self.ranks.arguments(slots, UNLIMITED_NS, UNLIMITED)
        if len(each) == 1:
            tensors = {name: getattr(self.memory, name) for name in TENSORS}
            self.last = launch(self.kernel, self.layout, each[0], tensors, seed=seed, **conditions)
        else:
            ranks, pointers = self.ranks.each, dict(enumerate(each))
            self.last = launch_ranks(self.kernel, self.layout, ranks, pointers, seed=seed, **conditions)
        self.launches += 1
        for m in self.ranks.each:
            assert int(m.mailbox[2]) != Outcome.FAILED, m.error.tolist()

    def told(self, slot: int) -> tuple[list[int], Outcome]:
        """A slot's tokens so far, and why they end; RUNNING if they do not."""
        tokens, outcome = [], Outcome.RUNNING
        for number, word in enumerate(self.memory.outbox[slot, :, 0].tolist(), 1):
            read = read_word(word, number)
            if read is None:
                break
            outcome, token = read
            tokens.append(token)
        return tokens, outcome
