"""How a caller waits for a token: in naps first, on a clock that only naps move."""

import threading
import time
from queue import Empty, SimpleQueue

import pytest

from kog_triton.backends import pace
from kog_triton.backends.mailbox import Inbox, Step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Queue:
    """A SimpleQueue in which something is at `there` seconds of the clock."""

    def __init__(self, clock: Clock, there: float) -> None:
        self._clock, self._there = clock, there
        self.waits: list[float | None] = []

    def empty(self) -> bool:
        return self._clock.now < self._there

    def get(self, timeout: float | None) -> str:
        self.waits.append(timeout)
        until = float("inf") if timeout is None else self._clock.now + timeout
        self._clock.now = max(self._clock.now, min(until, self._there))
        if self.empty():
            raise Empty
        return "found"

    @property
    def naps(self) -> int:
        """Waits that were no longer than one."""
        return sum(wait is not None and wait <= pace.NAP_S for wait in self.waits)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def test_it_naps_until_something_comes(clock):
    queue = Queue(clock, 100.00041)
    assert pace.get_awake(queue, 1.0) == "found"
    assert clock.now == 100.00041 and queue.naps == len(queue.waits) == 410e-6 // pace.NAP_S + 1


@pytest.mark.parametrize("timeout", [None, 1.0])
def test_it_naps_for_a_while_and_then_waits_in_one_piece(clock, timeout):
    queue = Queue(clock, 100.5)
    assert pace.get_awake(queue, timeout) == "found" and clock.now == 100.5
    assert queue.naps == pytest.approx(pace.NAPPING_S / pace.NAP_S, abs=1)
    assert queue.waits[-1] == (timeout and pytest.approx(timeout - pace.NAPPING_S))


@pytest.mark.parametrize("timeout", [5e-4, 0.1])
def test_naps_count_for_the_timeout(clock, timeout):
    with pytest.raises(Empty):
        pace.get_awake(Queue(clock, 200.0), timeout)
    assert clock.now == pytest.approx(100 + timeout)


def test_what_is_there_costs_no_nap(clock):
    queue = Queue(clock, 100.0)
    assert pace.get_awake(queue, 1.0) == "found" and queue.waits == [1.0]


def naps(clock: Clock) -> int:
    queue = Queue(clock, clock.now + 2e-4)
    assert pace.get_awake(queue, None) == "found"
    return queue.naps


def test_no_more_than_a_few_threads_nap(clock):
    """The next one waits in one piece at once; who stops napping makes room."""
    assert naps(clock) > 0
    for _ in range(pace.MOST_NAPPING):
        assert pace._napping.acquire(blocking=False)
    assert naps(clock) == 0
    pace._napping.release(pace.MOST_NAPPING)
    assert naps(clock) > 0


def test_nobody_naps_while_many_wait_for_a_first_word(monkeypatch):
    """Who naps already stops; behind its first word a request counts no more."""
    inboxes = [Inbox() for _ in range(pace.MOST_NAPPING + 1)]
    threads = [threading.Thread(target=inbox.read, args=(10.0,)) for inbox in inboxes]
    for thread in threads:
        thread.start()
    while len(pace.first_words) < len(inboxes):
        time.sleep(1e-4)
    with monkeypatch.context() as patched:
        patched.setattr(pace, "time", clock := Clock())
        assert naps(clock) == 0
    for inbox, thread in zip(inboxes, threads, strict=True):
        inbox.push(Step(7))
        thread.join()
    assert not pace.first_words and inboxes[0]._begun
    with monkeypatch.context() as patched:
        patched.setattr(pace, "time", clock := Clock())
        assert naps(clock) > 0
    thread = threading.Thread(target=inboxes[0].read, args=(10.0,))
    thread.start()
    inboxes[0].push(Step(8))
    thread.join()
    assert not pace.first_words


def test_who_naps_stops_when_many_wait_for_a_first_word(clock):
    queue = Queue(clock, 100.5)
    get, others = queue.get, [object() for _ in range(pace.MOST_NAPPING + 1)]

    def joined(timeout):
        pace.first_words.update(others)
        return get(timeout)

    queue.get = joined
    try:
        assert pace.get_awake(queue, None) == "found" and queue.naps == 1
    finally:
        pace.first_words.difference_update(others)


def test_a_read_waits_no_longer_than_it_may():
    """Naps count; what comes while a reader naps is read."""
    inbox = Inbox()
    assert inbox.read(0) == inbox.read(1e-3) == []
    threading.Timer(5e-4, inbox.push, [Step(7)]).start()
    assert [step.token for step in inbox.read(10.0)] == [7]


def test_a_queue_of_python_is_waited_for_as_such():
    queue: SimpleQueue[int] = SimpleQueue()
    with pytest.raises(Empty):
        pace.get_awake(queue, 1e-3)
    threading.Timer(2 * pace.NAPPING_S, queue.put, [5]).start()
    assert pace.get_awake(queue, None) == 5
