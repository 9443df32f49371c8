"""How a long prompt and the requests beside it share a GPU: the lengths of slices, and of the launches between them."""

from collections import deque
from statistics import median

# Of requests beside a prompt: the longest time from token to token, in seconds or in steps of their own, whichever is
# more, and the part of the time that they get. A little less and more than what is promised, 12 ms, three and 0.3.
GAP_S = 0.0118
GAP_STEPS = 2.95
OTHERS = 0.32
# Of that longest time, for what a slice takes longer than its work told: at p99 0.1 to 0.5 ms
# (benchmarks/cuda-log.md#slices).
SLACK_S = 0.0006
UNKNOWN_S = 0.004  # of a slice before any launch has been timed
# Launches of whose steps the median counts: by one of 6.7 ms, of 5.2 otherwise, two slices were 2.5 ms too long.
STEPS = 5


class Share:
    """How long a slice of a prompt is and how many tokens the others get behind it.

    The others wait for a token, with the launch that makes it, no longer than GAP_STEPS of their own steps or GAP_S,
    whichever is more, and get the part OTHERS of the time from one slice to the next, or more if that would be too
    long. What the prompt got too much of it, as when the GPU waited for the host, or too little, as pieces do not fill
    a slice, counts for its next slice.

    A launch of one token between slices takes longer than a step of the same requests alone, 4.1 to 4.4 ms for 3.9 of
    8B's seven: `told` keeps both apart, for three times the longer one is a gap that nobody was promised
    (benchmarks/cuda-log.md#slices).
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=STEPS)  # seconds, of the last launches' tokens
        self._own: deque[float] = deque(maxlen=STEPS)  # of those without a prompt beside them
        self._since: float | None = None  # the last slice's begin
        self._given = 0.0  # seconds of launches since then
        self._over = 0.0  # seconds that the prompt got too much

    def tokens(self) -> int:
        """Of each request, between two slices."""
        step = self._step
        return max(1, int((self._gap() - step) / self._due(step))) if step else 1

    def slice_s(self, now: float) -> float:
        """Of the slice that begins now."""
        step = self._step
        due = self._due(self.tokens() * step)
        if self._since is not None:
            self._over += now - self._since - self._given - self._due(self._given)
            self._over = min(max(self._over, -due), due)
        self._since, self._given = now, 0.0
        if not step:
            return UNKNOWN_S
        # Half of it: the slice that was queued before this one did not know of it yet.
        return max(0.0, min(due - self._over / 2, self._gap() - step - SLACK_S))

    def told(self, seconds: float, tokens: int, beside: bool) -> None:
        """What a launch took for so many tokens of each request; `beside`: a prompt went on before or behind it."""
        if tokens:
            self._steps.append(seconds / tokens)
            if not beside:
                self._own.append(seconds / tokens)
        self._given += seconds

    def alone(self) -> None:
        """No prompt is there any more, or nobody beside it."""
        self._since, self._over = None, 0.0

    @property
    def _step(self) -> float:
        """Seconds; 0: no launch was timed."""
        return median(self._steps) if self._steps else 0.0

    def _gap(self) -> float:
        own = min(self._step, median(self._own)) if self._own else self._step
        return max(GAP_S, GAP_STEPS * own)

    def _due(self, seconds: float) -> float:
        """To a prompt, beside so many seconds of launches."""
        return seconds * (1 - OTHERS) / OTHERS
