"""Fresh prompts of up to 256 tokens (short_pass.py): those that wait when one begins share its pass.

On several GPUs each runs a pass of its own, which wait for each other: they are queued together, a launch of each in
turn, and no other engine's work is to come between them (PromptRun.meets).

A pass is never cut. Which prompts take one is a function of their own lengths, and a prompt's bits do not depend on who
shares it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import torch

from kog_triton.backends.cuda.layout.prompt import ProductKernel
from kog_triton.backends.cuda.layout.short_pass import SHORT_KERNELS
from kog_triton.backends.cuda.short_pass import MOST_TOKENS, ShortPass, ShortPrompt
from kog_triton.backends.mailbox import Request
from kog_triton.backends.prefill.library import check_prompt, on_device
from kog_triton.backends.prefill.slices import Piece, PromptRun, Rate
from kog_triton.backends.watchdog import reached

T = TypeVar("T")


class ShortRun(PromptRun):
    """A prompt's part of a pass."""

    is_timed = False  # never cut

    def __init__(self, owner: "ShortPrompts", prompt: ShortPrompt) -> None:
        end = len(prompt.tokens)
        super().__init__(0, end, self._queue, nullcontext, owner.device, Rate(), short=True, others=owner.others)
        self.meets = bool(owner.others)
        self.prompt, self._owner = prompt, owner
        self._along: list[ShortRun] = []

    def _mark(self) -> Callable[[], bool]:
        return self._owner.last_ended

    def _reached(self, mark: Callable[[], bool]) -> bool:
        return mark()

    def take_along(self, others: Sequence[PromptRun]) -> list[PromptRun]:
        prompts, along = [self.prompt], []
        for other in others:
            if not isinstance(other, ShortRun) or other is self:
                continue
            if self._owner.fits([*prompts, other.prompt]):
                prompts.append(other.prompt)
                along.append(other)
        self._along = along
        return [*along]

    def _queue(self, at_once: bool) -> Iterator[Piece]:
        """All of it; no piece is left."""
        self._owner.queue([self.prompt, *(run.prompt for run in self._along)])
        for run in self._along:
            run.filled = run.end
        return iter(())


class ShortPrompts:
    """Of one model on one GPU or several, a pass a rank; `room`, positions of a slot."""

    def __init__(self, passes: Sequence[ShortPass], room: int, vocab: int) -> None:
        self._passes, self._room, self._vocab = passes, room, vocab
        self.fits = passes[0].fits
        self.device, *self.others = (one.device for one in passes)
        self._graphs: dict[ProductKernel, list[torch.cuda.CUDAGraph]] = {}
        self._to_capture = list(SHORT_KERNELS) if self.device.type == "cuda" else []
        self._number = self._told = 0  # of the last pass, and of the last that was told to have waited in vain
        self.last_ended: Callable[[], bool] = lambda: True  # that pass has, on the first GPU

    def takes(self, request: Request) -> bool:
        return not request.cached and len(request.prompt) <= MOST_TOKENS

    def begin(self, request: Request) -> ShortRun:
        """RequestError if its tokens do not fit the slot or are none of the model's."""
        check_prompt(request.prompt, 0, self._room, self._vocab)
        return ShortRun(self, ShortPrompt(request.prompt, request.slot))

    def queue(self, prompts: Sequence[ShortPrompt]) -> None:
        """On the current stream of each GPU."""
        self._number += 1
        alone = not self.others and self.last_ended()
        stream = stream_of(self.device) if alone else None
        try:
            self._launch(prompts, stream)
        finally:  # of a pass that failed midway, too: what was queued by then still runs
            self.last_ended = reached(self.device)

    def _launch(self, prompts: Sequence[ShortPrompt], stream: int | None) -> None:
        kernel = SHORT_KERNELS[-1]
        for one in self._passes:  # all of them first: nothing that may wait stands between launches
            kernel = self._on(one, partial(one.write, prompts, self._number, stream))
        if kernel in self._graphs:
            for one, graph in zip(self._passes, self._graphs[kernel], strict=True):
                self._on(one, graph.replay)
        else:
            streams = [stream_of(one.device) for one in self._passes]
            # In turn: what one GPU waits for is never behind more launches than a queue of a driver holds.
            for together in zip(*(one.launches(kernel) for one in self._passes), strict=True):
                for one, launch, own in zip(self._passes, together, streams, strict=True):
                    self._on(one, partial(launch, own))

    def gave_up(self) -> str:
        """What a pass has waited for in vain that was not told before; waits for GPUs. "" if all came."""
        for one in self._passes:
            number, said = one.gave_up(self._told)
            if said:
                self._told = number
                return said
        return ""

    def make_ready(self) -> bool:
        """Capture one more pass's graphs, which take the host less than its launches; whether there are others."""
        if not self._to_capture:
            return False
        kernel = self._to_capture.pop(0)
        self._graphs[kernel] = [self._capture(one, kernel) for one in self._passes]
        return bool(self._to_capture)

    def memory_bytes(self) -> int:
        return sum(one.nbytes for one in self._passes)

    def _capture(self, one: ShortPass, kernel: ProductKernel) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # torch captures on one stream of its own, which is of the first GPU that it captured on.
        stream = torch.cuda.Stream(one.device) if self.others else None
        capture = torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local")
        with on_device(one.device), capture:
            one.queue(kernel, stream_of(one.device))
        return graph

    def _on(self, one: ShortPass, act: Callable[[], T]) -> T:
        if not self.others:
            return act()
        with on_device(one.device):
            return act()


def stream_of(device: torch.device) -> int:
    """The address of the current one; of a CPU 0."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
