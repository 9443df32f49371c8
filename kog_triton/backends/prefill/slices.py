"""A prompt run by the library in slices, between which others may use the GPU.

A slice is some pieces of one chunk of tokens or of several: products and attentions. Which tokens a chunk has is a
function of their positions, so that the slices of a prompt, however long, leave the same bits. How long a piece will
take is told by its work and by what slices before it took: the host queues a slice at once and waits for none of its
pieces, so that what comes behind it is queued before it has ended.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from kog_triton.backends.watchdog import wait_for

# Of slices beside which nobody waits for tokens. Two are on their way: a cancel is heard twice as late.
ALONE_S = 0.025
SLICE = "a slice of a prompt"


class Piece(NamedTuple):
    """What is queued next.

    filled  positions whose keys and values are there for what is queued behind all pieces before
    work    of the device, in a unit of which pieces take the same time
    """

    filled: int
    work: float


class Rate:
    """Seconds of a unit of work on one device; 0 until a slice was timed."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def told(self, seconds: float, work: float) -> None:
        """What a slice took. Halfway to it: one that something else held up does not count for all."""
        now = seconds / work
        self.seconds = (self.seconds + now) / 2 if self.seconds else now


class Timed(NamedTuple):
    """A slice on its way, between two marks of its stream; `others` are those of its ends on other GPUs."""

    begun: Any
    ended: Any
    work: float
    others: Sequence[Any]


class PromptRun:
    """A prompt on its way into its slot; one of a library's at a time.

    first, end  positions that it is to fill; up to `filled` their keys and values are there for what is queued behind
    pieces      tells the first piece, then queues what it told and tells the next one, to the last; `at_once`: as few
                as there can be
    settings    what holds meanwhile
    rate        of the device, over all its prompts
    short       `at_once` it is one piece, and a short one: none begins before another has ended
    others      GPUs that run it beside `device`, by which it is timed
    meets       they wait for each other meanwhile: nothing of another engine is to come between
    """

    meets = False

    def __init__(
        self,
        first: int,
        end: int,
        pieces: Callable[[bool], Iterator[Piece]],
        settings: Callable[[], AbstractContextManager[None]],
        device: torch.device,
        rate: Rate,
        short: bool = False,
        others: Sequence[torch.device] = (),
    ) -> None:
        self.short = short
        self._others = [device for device in others if device.type == "cuda"]
        self.filled, self.end = first, end
        self._begin, self._settings, self._device, self._rate = pieces, settings, device, rate
        self._pieces: Iterator[Piece] | None = None
        self._next: Piece | None = None
        self._before: Timed | None = None

    def take_along(self, others: "Sequence[PromptRun]") -> "list[PromptRun]":
        """Those of `others`, in their order, that will run with this one: its first `advance` ends them, too."""
        return []

    def advance(self, seconds: float, at_once: bool = False) -> bool:
        """Queue pieces for no more than so many seconds of the device, one at least; whether the last one is queued.

        Waits for the slice before this one, so that no more than two are on their way.
        """
        if self._before is not None and self._reached(self._before.ended):
            self.wait()
        with self._settings():
            begun, work = self._mark(), 0.0
            if self._pieces is None:
                self._pieces = self._begin(at_once)
                self._next = next(self._pieces, None)
            while self._next is not None and self._fits(work, self._next.work, seconds):
                work += self._next.work
                self._next = next(self._pieces, None)
            self.filled = self.end if self._next is None else self._next.filled
            others = [torch.cuda.current_stream(d).record_event() for d in self._others]
            queued = Timed(begun, self._mark(), work, others)
        self.wait()
        self._before = queued
        return self._next is None

    def wait(self) -> None:
        """For the slice that was queued last, on all GPUs; Stalled if one does not end it."""
        timed, self._before = self._before, None
        if timed is not None:
            wait_for(lambda: self._reached(timed.ended), SLICE, self._device)
            for device, end in zip(self._others, timed.others, strict=True):
                wait_for(end.query, SLICE, device)
            seconds = self._seconds(timed.begun, timed.ended)
            if timed.work:  # a graph has none
                self._rate.told(seconds, timed.work)

    def _fits(self, work: float, more: float, seconds: float) -> bool:
        """Of a slice whose pieces have so much work, one more. While nothing was timed a slice is a piece."""
        if not work or seconds == math.inf:
            return True
        return self._rate.seconds > 0 and (work + more) * self._rate.seconds <= seconds

    def _mark(self) -> Any:
        """A point of the current stream; on a CPU, where nothing is queued, a time."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _reached(self, mark: Any) -> bool:
        return self._device.type != "cuda" or bool(mark.query())

    def _seconds(self, first: Any, last: Any) -> float:
        """Between two marks, both reached."""
        if self._device.type != "cuda":
            return float(last - first)
        return float(first.elapsed_time(last)) / 1e3
