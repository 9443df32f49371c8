"""Stop strings over a stream of text.

The answer ends where the first stop string is complete; if several end there, the longest counts.
Text is held back only while it could still be the beginning of a stop string, so what comes out
does not depend on how the stream was cut into pieces.
"""

from collections.abc import Sequence
from typing import AnyStr


class StopMatcher:
    """`feed` text, emit what it returns; `matched` is the stop string that ended the answer."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""
        self._exempt = 0  # so much of what is held came by `skip`: no match ends there

    def feed(self, text: str) -> str:
        """The text that may be shown now; nothing once a stop string has matched."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # first by where a match ends, then by where it starts: none can start in text already shown
        first = {s: max(0, self._exempt - len(s) + 1) for s in self._stops}
        ends = [(at + len(s), at, s) for s in self._stops if (at := text.find(s, first[s])) >= 0]
        if ends:
            end, start, self.matched = min(ends)
            self._held = ""
            return text[: end if self._include else start]
        return self._hold(text)

    def skip(self, text: str) -> str:
        """As `feed`, for text in which no stop string ends: its end may still begin one."""
        if not self._stops:
            return text
        text = self._held + text
        self._exempt = len(text)
        return self._hold(text)

    def _hold(self, text: str) -> str:
        """The text up to where a stop string may have begun; the rest waits."""
        shown = len(text) - max(overlap(text, stop) for stop in self._stops)
        self._exempt = max(0, self._exempt - shown)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: AnyStr, stop: AnyStr) -> int:
    """Length of the longest end of the text that is a beginning, not the whole, of `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[:1], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
