"""When a host that polls looks for tokens: just before the next one is due, and often from then on.

A token of a 1B model takes 0.5 ms. To look every 50 us costs a tenth of that in jitter, and a fifth on Linux, which by
default rounds a thread's sleeps up by 50 us more. To look all the time costs more: the looks hold Python's lock, which
the caller's thread needs to get the token, and one that misses its chance waits 5 ms for the next.

A scripted device of 560 us a token on two loaded CPU cores (p99/p50 1.05 of its own): p99/p50 of arrivals in the
caller's thread 1.44 for looks every 105 us, 1.18 for exact 50 us, 1.16 so; tokens were 164, 100 and 84 us late.

A thread that waits for a token gets it as soon as it is put into a queue, if its core is awake: a core on which nobody
runs falls asleep. So the thread waits in naps first (`get_awake`). To go on it needs the lock, which the host lets go
of at once (`Pace.told`).
What each of these gave beside an H200: benchmarks/cuda-log.md#arrivals.
"""

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TypeVar

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
# The host wakes so long before the next token is due: half of a step, and no less than EARLY_S, since a core takes as
# long to wake for short steps.
EARLY = 0.5  # of a step
EARLY_S = 220e-6
GROWTH = 1.1  # of what is taken for a step, from one to the next
KEPT_PACE = 0.9  # of a token's lateness that does not move the next one
FINE_S = 10e-6  # between glances around that time
COARSE_S = 50e-6  # and once it is overdue by a step: a prompt, or a mask that others wait for
AGAIN_S = 20e-6  # after a token, for its caller to take the lock; other requests' may be on their way
LONGEST_S = 500e-6  # without a look: what the caller has to say waits so long
ENDING_S = 2e-3  # that a kernel may take to end when it has said its last
NAP_S = 50e-6  # of who waits for a token: a core that sleeps no longer wakes at once
NAPPING_S = 2e-3  # for so long; a later wake matters less to slower tokens
MOST_NAPPING = 2  # threads at once: each wakes for Python's lock, and takes it from all others

T = TypeVar("T")


class Pace:
    """When to look next during one launch; a glance asks only whether there is something to look at."""

    def __init__(self) -> None:
        self._last = time.perf_counter()  # when the launch began or a look last told something
        self._step = self._due = math.inf  # seconds from token to token; when the next one comes
        self._begun = False  # whether a token has come

    def told(self, tokens: int) -> None:
        """A look told so many tokens of one request. Sleeps, so that who waits for them gets Python's lock at once."""
        now = time.perf_counter()
        if self._begun:
            # A token told late, as the host was busy, makes a long gap and a short one: the short one is to be
            # believed, and what is due next is hardly later for it.
            self._step = min((now - self._last) / tokens, GROWTH * self._step)
            late = min(max(now - self._due, 0.0), self._step)
            self._due = now - KEPT_PACE * late + self._step
        self._last, self._begun = now, True
        time.sleep(AGAIN_S)

    def wait(self, ends: bool, glance: Callable[[], bool]) -> None:
        """After a look that told nothing; `ends`: the launch may end now."""
        now, step = time.perf_counter(), self._step
        known = not ends and step < math.inf
        wake = self._due - max(EARLY * step, EARLY_S) if known else now
        if now < wake:
            time.sleep(min(wake - now, LONGEST_S))
            return
        fine_until = self._due + step if known else self._last + ENDING_S
        until = now + LONGEST_S
        while now < until:
            time.sleep(FINE_S if now < fine_until else COARSE_S)
            if glance():
                return
            now = time.perf_counter()


_napping = threading.Semaphore(MOST_NAPPING)
# Who waits for the first word of a request: of more than MOST_NAPPING nobody naps, for the thread that brings their
# prompts on their way lost up to 0.1 ms to them each time it let go of the lock (benchmarks/cuda-log.md#short-prompts).
first_words: set[object] = set()


def get_awake(queue: SimpleQueue[T], timeout: float | None) -> T:
    """What `queue.get(timeout=timeout)` gets, waited for in naps of NAP_S for up to NAPPING_S; not while many others
    nap or wait for a first word. queue.Empty if nothing comes within `timeout` seconds (None: as long as it takes)."""
    begun = time.perf_counter()
    if queue.empty() and len(first_words) <= MOST_NAPPING and _napping.acquire(blocking=False):
        try:
            until = begun + min(math.inf if timeout is None else timeout, NAPPING_S)
            while len(first_words) <= MOST_NAPPING and (left := until - time.perf_counter()) > 0:
                try:
                    return queue.get(timeout=min(NAP_S, left))
                except Empty:
                    pass
        finally:
            _napping.release()
    if timeout is not None:
        timeout = max(timeout - (time.perf_counter() - begun), 0.0)
    return queue.get(timeout=timeout)


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
