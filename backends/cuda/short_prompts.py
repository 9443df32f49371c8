"""Fresh prompts of up to 256 tokens (short_pass.py): those that wait when one begins share its pass.

A pass is never cut. Which prompts take one is a function of their own lengths, and a prompt's bits do not depend on who
shares it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch

from kog_triton.backends.cuda.layout.prompt import ProductKernel
from kog_triton.backends.cuda.layout.short_pass import SHORT_KERNELS
from kog_triton.backends.cuda.short_pass import MOST_TOKENS, ShortPass, ShortPrompt
from kog_triton.backends.mailbox import Request
from kog_triton.backends.prefill.library import check_prompt, on_device
from kog_triton.backends.prefill.slices import Piece, PromptRun, Rate
from kog_triton.backends.watchdog import reached


class ShortRun(PromptRun):
    """A prompt's part of a pass."""

    is_timed = False  # never cut

    def _mark(self) -> Callable[[], bool]:
        return self._owner.last_ended

    def _reached(self, mark: Callable[[], bool]) -> bool:
        return mark()

    def __init__(self, owner: "ShortPrompts", prompt: ShortPrompt) -> None:
        end = len(prompt.tokens)
        super().__init__(0, end, self._queue, nullcontext, owner.device, Rate(), short=True)
        self.prompt, self._owner = prompt, owner
        self._along: list[ShortRun] = []

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
    """Of one model on one GPU; `room`, positions of a slot."""

    def __init__(self, passes: ShortPass, device: torch.device, room: int, vocab: int) -> None:
        self.device, self.fits = device, passes.fits
        self._pass, self._room, self._vocab = passes, room, vocab
        self.last_ended: Callable[[], bool] = lambda: True  # of the pass that was queued last
        self._graphs: dict[ProductKernel, torch.cuda.CUDAGraph] = {}
        self._to_capture = list(SHORT_KERNELS) if device.type == "cuda" else []

    def takes(self, request: Request) -> bool:
        return not request.cached and len(request.prompt) <= MOST_TOKENS

    def begin(self, request: Request) -> ShortRun:
        """RequestError if its tokens do not fit the slot or are none of the model's."""
        check_prompt(request.prompt, 0, self._room, self._vocab)
        return ShortRun(self, ShortPrompt(request.prompt, request.slot))

    def queue(self, prompts: Sequence[ShortPrompt]) -> None:
        """On the current stream."""
        stream = stream_of(self.device)
        kernel = self._pass.write(prompts, stream if self.last_ended() else None)
        if kernel in self._graphs:
            self._graphs[kernel].replay()
        else:
            self._pass.queue(kernel, stream)
        self.last_ended = reached(self.device)

    def make_ready(self) -> bool:
        """Capture one more pass's graph, which takes the host less than its launches; whether there are others."""
        if not self._to_capture:
            return False
        kernel, graph = self._to_capture.pop(0), torch.cuda.CUDAGraph()
        with (
            on_device(self.device),
            torch.cuda.graph(graph, capture_error_mode="thread_local"),
        ):
            self._pass.queue(kernel, stream_of(self.device))
        self._graphs[kernel] = graph
        return bool(self._to_capture)

    def memory_bytes(self) -> int:
        return self._pass.nbytes


def stream_of(device: torch.device) -> int:
    """The address of the current one; of a CPU 0."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
