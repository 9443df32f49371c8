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
        self.host = pace.Pace()

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
        late, host = [], self.host
        while self.told < tokens:
            new = self.waits()
            late += [self.now - (self.told + i + 1) * STEP for i in range(new)]
            self.told += new
            if new:
                host.told(new)
            else:
                host.wait(False, self.waits)
        return late


def test_a_token_is_told_at_once_and_the_host_sleeps_until_it_is_due(monkeypatch):
    world = World(monkeypatch)
    late = world.late(100)
    assert max(late[2:]) <= 2 * pace.FINE_S + pace.AGAIN_S
    assert world.naps < 100 * (4 + 1.5 * pace.EARLY * STEP / pace.FINE_S)


def test_looks_begin_as_early_as_steps_ask(monkeypatch):
    """More than half a step of two GPUs, half of a longer one, and no more than a step; each look takes FINE_S."""
    for step, early in ((1e-3, pace.EARLY * 1e-3), (300e-6, pace.EARLY_S), (150e-6, 150e-6)):
        monkeypatch.setattr(f"{__name__}.STEP", step)
        world = World(monkeypatch)
        world.late(100)
        assert world.naps == pytest.approx(100 * early / pace.FINE_S, rel=0.2)


def test_one_that_is_told_late_makes_no_other_late(monkeypatch):
    late = World(monkeypatch, hiccup=30.04 * STEP).late(60)
    assert late[30] == pytest.approx(0.5 * STEP, rel=0.3)
    assert max(late[31:]) <= 2 * pace.FINE_S + pace.AGAIN_S + 10e-6


def test_a_launch_that_may_end_is_looked_at_often(monkeypatch):
    world = World(monkeypatch)
    world.late(5)
    host, begun = world.host, world.now
    host.wait(True, lambda: world.now > begun + 100e-6)
    assert world.now - begun < 100e-6 + 2 * pace.FINE_S


def test_the_lock_is_free_at_once_for_who_waits_for_a_token(monkeypatch):
    world = World(monkeypatch)
    world.host.told(1)
    assert world.now == pace.AGAIN_S


def test_a_token_that_is_late_by_a_step_is_looked_for_less_often(monkeypatch):
    world = World(monkeypatch)
    world.late(20)
    due, world.naps = world.now - pace.AGAIN_S + STEP, 0
    while world.now < due + 2e-3:
        world.host.wait(False, lambda: False)
    fine, coarse = (pace.EARLY + 1) * STEP / pace.FINE_S, (2e-3 - STEP) / pace.COARSE_S
    assert world.naps == pytest.approx(fine + coarse, rel=0.1)


@pytest.mark.skipif(pace._prctl is None, reason="Linux alone rounds sleeps")
def test_a_thread_gets_its_own_rounding_of_sleeps_back():
    def slack():
        return pace._prctl(pace.PR_GET_TIMERSLACK, 0, 0, 0, 0)

    before = slack()
    with pace.exact_sleeps():
        assert slack() == 1
    assert slack() == before > 1
