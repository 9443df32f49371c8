"""When a stream says what it has: the first token at once, then all tokens of some milliseconds together.

A browser that parses the answer again at each event freezes at a few hundred events a second; at 3,000 tokens/s one
event a display frame holds 30 tokens. `tokens` asks for an event every so many tokens instead: 1 is each.
"""

import math
from dataclasses import dataclass

INTERVAL_S = 0.010  # between events: above it with the timer's own lateness, they stay within 8 to 16 ms
MAX_INTERVAL_S = 10.0
MAX_TOKENS = 1 << 16


@dataclass(frozen=True)
class Interval:
    """seconds between events; tokens of an event instead, 0 to go by time."""

    seconds: float = INTERVAL_S
    tokens: int = 0


class Pacing:
    """The events of one stream, told the time by its caller."""

    def __init__(self, interval: Interval) -> None:
        self._interval = interval
        self._last: float | None = None  # when the last event went out

    def wait(self, unread: int, now: float) -> float:
        """Seconds until what is unread may go out; infinite if it takes more tokens first."""
        if self._last is None:
            return 0.0
        if self._interval.tokens:
            return 0.0 if unread >= self._interval.tokens else math.inf
        return max(0.0, self._last + self._interval.seconds - now)

    def sent(self, now: float) -> None:
        self._last = now
