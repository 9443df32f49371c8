"""When the host that polls a kernel looks: by a clock of the test's own."""

from types import SimpleNamespace

import pytest

from kog_triton.backends import pace

STEP = 560e-6


class World:
    """Time that only sleeps move, and a device that makes a token every STEP."""

    def __init__(self, monkeypatch, hiccup=float("inf")):
        self.now, self.naps, self.hiccup, self.told = 0.0, 0, hiccup, 0
        clock = SimpleNamespace(perf_counter=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(pace, "time", clock)

    def sleep(self, seconds):
        if self.now > self.hiccup:
            seconds, self.hiccup = 1.4 * STEP, float("inf")
        self.now += seconds
        self.naps += 1

    def waits(self):
        """Tokens that were not told."""
        return int(self.now / STEP) - self.told

    def late(self, tokens):
        """How late each token is told."""
        late, wait = [], pace.Pace()
        while self.told < tokens:
            new = self.waits()
            late += [self.now - (self.told + i + 1) * STEP for i in range(new)]
            self.told += new
            wait.wait(new, False, self.waits)
        return late


def test_a_token_is_told_at_once_and_the_host_sleeps_until_it_is_due(monkeypatch):
    world = World(monkeypatch)
    late = world.late(100)
    assert max(late[2:]) <= 2 * pace.FINE_S + pace.AGAIN_S
    assert world.naps < 100 * (4 + 1.5 * pace.EARLY * STEP / pace.FINE_S)


def test_looks_begin_as_early_for_short_steps(monkeypatch):
    """More than half a step of two GPUs, and no more than a step; each look takes FINE_S."""
    for step, early in ((300e-6, pace.EARLY_S), (150e-6, 150e-6)):
        monkeypatch.setattr(f"{__name__}.STEP", step)
        world = World(monkeypatch)
        world.late(100)
        assert world.naps == pytest.approx(100 * early / pace.FINE_S, rel=0.2)


def test_one_that_is_told_late_makes_no_other_late(monkeypatch):
    late = World(monkeypatch, hiccup=30.04 * STEP).late(60)
    assert late[30] == pytest.approx(0.5 * STEP, rel=0.3)
    assert max(late[31:]) <= 2 * pace.FINE_S + pace.AGAIN_S + 10e-6


def test_a_launch_that_may_end_is_looked_at_often(monkeypatch):
    world, wait = World(monkeypatch), pace.Pace()
    for _ in range(5):
        world.now += STEP
        wait.wait(1, False, lambda: False)
    begun = world.now
    wait.wait(1, True, lambda: False)
    wait.wait(0, True, lambda: world.now > begun + 100e-6)
    assert world.now - begun < 100e-6 + pace.AGAIN_S + 2 * pace.FINE_S


@pytest.mark.skipif(pace._prctl is None, reason="Linux alone rounds sleeps")
def test_a_thread_gets_its_own_rounding_of_sleeps_back():
    def slack():
        return pace._prctl(pace.PR_GET_TIMERSLACK, 0, 0, 0, 0)

    before = slack()
    with pace.exact_sleeps():
        assert slack() == 1
    assert slack() == before > 1
