"""A prompt run by the library in slices, between which others may use the GPU.

A slice is some layers of one chunk of tokens. Which tokens a chunk has is a function of their positions, so that the
slices of a prompt, however long, leave the same bits.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

LEAD = 2  # layers that are queued ahead of what the host waits for
ALONE_S = 0.05  # of a slice beside which nobody waits for tokens: how late a cancel is heard


class PromptRun:
    """A prompt on its way into its slot; one of a library's at a time.

    filled    positions from the first one on whose keys and values are there for what is queued behind
    pieces    queues the run piece by piece, giving `filled`; `at_once`: whether as few pieces as there can be
    settings  what holds while a piece is queued
    """

    def __init__(
        self,
        filled: int,
        pieces: Callable[[bool], Iterator[int]],
        settings: Callable[[], AbstractContextManager[None]],
        device: torch.device,
    ) -> None:
        self.filled = filled
        self._begin, self._settings, self._device = pieces, settings, device
        self._pieces: Iterator[int] | None = None
        self._each = 0.0  # seconds of a piece, as far as is known

    def advance(self, seconds: float, at_once: bool = False) -> bool:
        """Queue pieces for about so many seconds of the device, one at least; whether the last one is queued.

        Waits for them unless it is; with no bound, for none.
        """
        if self._pieces is None:
            self._pieces = self._begin(at_once)
        reached, queued = [self._mark()], 0
        while not queued or (queued + 1) * self._each < seconds:
            with self._settings():
                filled = next(self._pieces, None)
            if filled is None:
                return True
            self.filled = filled
            reached.append(self._mark())
            queued += 1
            if queued > LEAD and seconds < math.inf:
                self._each = self._seconds(reached[0], reached[-1 - LEAD]) / (queued - LEAD)
        self._each = self._seconds(reached[0], reached[-1]) / queued
        return False

    def _mark(self) -> Any:
        """A point of the current stream; on a CPU, where nothing is queued, a time."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, first: Any, last: Any) -> float:
        """Between two marks, once the last one is reached."""
        if self._device.type != "cuda":
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
