"""A caller's looks before it waits in earnest, on a clock that only sleeps move."""

import threading

import pytest

from kog_triton.backends import pace
from kog_triton.backends.mailbox import Inbox, Step


class Clock:
    def __init__(self) -> None:
        self.now, self.naps = 100.0, 0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.naps += 1


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def test_it_looks_until_there_is_news(clock):
    pace.nap_until(lambda: clock.now >= 100.0004, 1.0)
    assert clock.now == pytest.approx(100.0004, abs=pace.NAP_S)
    assert clock.naps == pytest.approx(400e-6 / pace.NAP_S, abs=1)


@pytest.mark.parametrize(("timeout", "took"), [(float("inf"), pace.NAPPING_S), (5e-4, 5e-4)])
def test_it_ends_after_a_while_or_the_timeout(clock, timeout, took):
    pace.nap_until(lambda: False, timeout)
    assert clock.now - 100 == pytest.approx(took, abs=pace.NAP_S)


def test_news_that_is_there_costs_no_look(clock):
    pace.nap_until(lambda: True, 1.0)
    assert clock.naps == 0


def test_no_more_than_a_few_threads_look(clock):
    """The next one waits for its queue at once; who stops looking makes room."""
    pace.nap_until(lambda: False, 1e-4)
    for _ in range(pace.MOST_NAPPING):
        assert pace._napping.acquire(blocking=False)
    before = clock.naps
    pace.nap_until(lambda: False, 1e-4)
    assert clock.naps == before > 0
    pace._napping.release(pace.MOST_NAPPING)
    pace.nap_until(lambda: False, 1e-4)
    assert clock.naps > before


def test_nobody_looks_while_many_wait_for_a_first_word(clock):
    """Who looks already stops; behind its first word a request counts no more."""
    inboxes = [Inbox() for _ in range(pace.MOST_NAPPING + 1)]
    threads = [threading.Thread(target=inbox.read, args=(10.0,)) for inbox in inboxes]
    for thread in threads:
        thread.start()
    while len(pace.first_words) < len(inboxes):
        pass
    before = clock.naps
    pace.nap_until(lambda: False, 1e-4)
    assert clock.naps == before
    for inbox, thread in zip(inboxes, threads, strict=True):
        inbox.push(Step(7))
        thread.join()
    assert not pace.first_words and inboxes[0]._begun
    pace.nap_until(lambda: False, 1e-4)
    assert clock.naps > before
    thread = threading.Thread(target=inboxes[0].read, args=(10.0,))
    thread.start()
    inboxes[0].push(Step(8))
    thread.join()
    assert not pace.first_words


def test_a_read_waits_no_longer_than_it_may():
    """Naps count; what comes while a reader naps is read."""
    inbox = Inbox()
    assert inbox.read(0) == inbox.read(1e-3) == []
    threading.Timer(5e-4, inbox.push, [Step(7)]).start()
    assert [step.token for step in inbox.read(10.0)] == [7]
