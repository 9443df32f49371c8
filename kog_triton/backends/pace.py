"""When a host that polls looks for tokens: just before the next one is due, and often from then on.

A token of a 1B model takes 0.5 ms. To look every 50 us costs a tenth of that in jitter, and a fifth on Linux, which by
default rounds a thread's sleeps up by 50 us more. To look all the time costs more: the looks hold Python's lock, which
the caller's thread needs to get the token, and one that misses its chance waits 5 ms for the next.

A scripted device of 560 us a token on two loaded CPU cores (p99/p50 1.05 of its own): p99/p50 of arrivals in the
caller's thread 1.44 for looks every 105 us, 1.18 for exact 50 us, 1.16 so; tokens were 164, 100 and 84 us late.

The caller's thread looks as well, `nap_until`, before it waits in earnest: a core on which nobody runs falls asleep.
What each of these gave beside an H200: benchmarks/cuda-log.md#arrivals.
"""

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
# The host wakes so long before the next token is due: half of a step, and no less than EARLY_S unless the step is
# shorter, since a core takes as long to wake for short steps.
EARLY = 0.5  # of a step
EARLY_S = 220e-6
GROWTH = 1.1  # of what is taken for a step, from one to the next
KEPT_PACE = 0.9  # of a token's lateness that does not move the next one
FINE_S = 10e-6  # between glances around that time
COARSE_S = 50e-6  # and once it is overdue by a step: a prompt, or a mask that others wait for
AGAIN_S = 20e-6  # after a token: those of other requests may be on their way
LONGEST_S = 500e-6  # without a look: what the caller has to say waits so long
ENDING_S = 2e-3  # that a kernel may take to end when it has said its last
NAP_S = 25e-6  # of a caller between looks
NAPPING_S = 2e-3  # for so long; a later wake matters less to slower tokens
MOST_NAPPING = 2  # threads at once: each look takes Python's lock from all others


class Pace:
    """The waits of one launch between looks; a glance asks only whether there is something to look at."""

    def __init__(self) -> None:
        self._told: float | None = None
        self._wake = 0.0
        self._fine_until = time.perf_counter() + ENDING_S
        self._step = self._due = math.inf  # seconds from token to token; when the next one comes

    def wait(self, told: int, ends: bool, glance: Callable[[], bool]) -> None:
        """After a look that told so many tokens of one request; `ends`: the launch may end now."""
        now = time.perf_counter()
        if told:
            self._wake, self._fine_until = now, now + ENDING_S
            if self._told is not None:
                # A token told late, as the host was busy, makes a long gap and a short one: the short one is to be
                # believed, and what is due next is hardly later for it.
                step = self._step = min((now - self._told) / told, GROWTH * self._step)
                late = min(max(now - self._due, 0.0), step)
                self._due = now - KEPT_PACE * late + step
                if not ends:
                    self._wake = self._due - max(EARLY * step, min(EARLY_S, step))
                    self._fine_until = self._due + step
            self._told = now
            time.sleep(AGAIN_S)
        elif now < self._wake:
            time.sleep(min(self._wake - now, LONGEST_S))
        else:
            until = now + LONGEST_S
            while now < until:
                time.sleep(FINE_S if now < self._fine_until else COARSE_S)
                if glance():
                    return
                now = time.perf_counter()


_napping = threading.Semaphore(MOST_NAPPING)
# Who waits for the first word of a request: of more than MOST_NAPPING nobody looks, for the thread that brings their
# prompts on their way lost up to 0.1 ms to them each time it let go of the lock (benchmarks/cuda-log.md#short-prompts).
first_words: set[object] = set()


def nap_until(news: Callable[[], bool], timeout: float) -> None:
    """Look often until there is news, up to `timeout` seconds or NAPPING_S; not at all while others do, or while many
    wait for a first word."""
    if len(first_words) > MOST_NAPPING or news() or not _napping.acquire(blocking=False):
        return
    try:
        with exact_sleeps():
            until = time.perf_counter() + min(timeout, NAPPING_S)
            while len(first_words) <= MOST_NAPPING and not news() and time.perf_counter() < until:
                time.sleep(NAP_S)
    finally:
        _napping.release()


@contextmanager
def exact_sleeps() -> Iterator[None]:
    """Inside, Linux does not round this thread's sleeps up, to wake it together with others."""
    if _prctl is None:
        yield
        return
    before = _prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    _prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(PR_SET_TIMERSLACK, before, 0, 0, 0)


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
