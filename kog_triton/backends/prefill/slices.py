"""A prompt run by the library in slices, between which others may use the GPU.

A slice is some pieces of one chunk of tokens or of several: products and attentions. Which tokens a chunk has is a
function of their positions, so that the slices of a prompt, however long, leave the same bits. How long a piece will
take is told by its work and by what pieces of its kind took in slices before: a layer's are those of the layer before.
The host queues a slice at once and waits for none of its pieces, so that what comes behind it is queued before it has
ended.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from kog_triton.backends.watchdog import wait_for

# Of slices beside which nobody waits for tokens. Two are on their way: a cancel is heard twice as late.
ALONE_S = 0.025
# How much longer a piece is told than its kind takes, while none of its kind with as many rows was timed: slices that
# had such pieces took up to 0.9 ms of 7.5 longer (benchmarks/cuda-log.md#slices).
UNTIMED = 1.25
SLICE = "a slice of a prompt"


class Piece(NamedTuple):
    """What is queued next.

    filled  positions whose keys and values are there for what is queued behind all pieces before
    work    of the device, in a unit of which pieces of a kind take the same time, and others about that
    kind    by which pieces are alike
    rows    how many tokens it has: pieces of a kind that have as many are more alike than others
    begins  it has no work; behind it a pass of the library begins, of which nothing is there yet
    """

    filled: int
    work: float
    kind: str = ""
    rows: int = 0
    begins: bool = False


class Rate:
    """Seconds of a unit of work on one device, as slices took it: of pieces of a kind with so many rows, of a kind, and
    of any, 0 until a slice was timed."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], float] = {}

    @property
    def seconds(self) -> float:
        return self._known.get((), 0.0)

    def told(self, pieces: Iterable[tuple[Piece | None, float, float]]) -> None:
        """Pieces of a slice, their work and seconds; None: several that were not timed apart."""
        sums: dict[tuple[object, ...], tuple[float, float]] = {}
        for piece, work, seconds in pieces:
            alike: list[tuple[object, ...]] = [()]
            if piece is not None:
                alike += [(piece.kind,), (piece.kind, piece.rows)]
            for like in alike:
                before, done = sums.get(like, (0.0, 0.0))
                sums[like] = before + seconds, done + work
        for like, (seconds, work) in sums.items():
            if work:  # a graph has none
                now = seconds / work
                # Halfway: a slice that something else held up does not count for all.
                self._known[like] = (self._known.get(like, now) + now) / 2

    def of(self, piece: Piece) -> float:
        """Seconds that it will take, by those that were most alike."""
        known = self._known
        alike = known.get((piece.kind, piece.rows))
        return piece.work * (alike or UNTIMED * (known.get((piece.kind,)) or self.seconds))


class Span(NamedTuple):
    """Some of a slice, to a mark of its stream: a piece, or None: several."""

    piece: Piece | None
    work: float
    ended: Any


class Timed(NamedTuple):
    """A slice on its way, between marks of its stream; `others` are those of its ends on other GPUs.

    begun  None: nobody asks how long it takes
    """

    begun: Any
    spans: Sequence[Span]
    others: Sequence[Any]

    @property
    def ended(self) -> Any:
        return self.spans[-1].ended


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

    is_timed = True  # by class: how long its slices take is of use
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

    @property
    def inside(self) -> bool:
        """Some of a pass is queued, and the rest is to follow."""
        return self._next is not None and not self._next.begins

    def waits_for(self, other: "PromptRun") -> bool:
        """Whether its next pass would spoil the one that `other` is inside of."""
        return False

    def advance(self, seconds: float, at_once: bool = False) -> bool:
        """Queue pieces for no more than so many seconds of the device, one at least; whether the last one is queued.
        Between two passes it stops, unless all may be queued.

        Waits for the slice before this one, so that no more than two are on their way. Pieces `at_once` are not timed
        apart: a mark between two launches keeps the second from starting early.
        """
        if self._before is not None and self._reached(self._before.ended):
            self.wait()
        with self._settings():
            begun = self._mark() if self.is_timed else None
            spans, work, told = [], 0.0, 0.0
            try:
                if self._pieces is None:
                    self._pieces = self._begin(at_once)
                    self._next = next(self._pieces, None)
                while (piece := self._next) is not None and self._fits(work, told, piece, seconds):
                    work, told = work + piece.work, told + self._rate.of(piece)
                    self._next = next(self._pieces, None)
                    if not at_once:
                        spans.append(Span(piece, piece.work, self._mark()))
            except Exception:  # what was queued by then still runs, and `wait` is to wait for it
                self._before = self._timed(begun, [Span(None, 0.0, self._mark())])
                raise
            if not spans:
                spans.append(Span(None, work, self._mark()))
            self.filled = self.end if self._next is None else self._next.filled
            queued = self._timed(begun, spans)
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
            begins = [timed.begun, *(span.ended for span in timed.spans)]
            if self.is_timed:
                self._rate.told(
                    (span.piece, span.work, self._seconds(begun, span.ended))
                    for begun, span in zip(begins, timed.spans, strict=False)
                )

    def _fits(self, work: float, told: float, piece: Piece, seconds: float) -> bool:
        """One more, of a slice whose pieces have so much work and will take `told` seconds. While nothing was timed a
        slice is a piece."""
        if not work or seconds == math.inf:
            return True
        if piece.begins:
            return False
        return self._rate.seconds > 0 and told + self._rate.of(piece) <= seconds

    def _timed(self, begun: Any, spans: Sequence[Span]) -> Timed:
        others = [torch.cuda.current_stream(d).record_event() for d in self._others]
        return Timed(begun, spans, others)

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
