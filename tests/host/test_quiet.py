"""What a first request need not wait for is made ready when the engine has been without one for a while."""

import threading
import time

import pytest

from kog_triton import LLM, engine
from tests.lib.fake_backend import GREEDY, FakeBackend, cold

PARTS = 3


class InParts(FakeBackend):
    """Has three parts to make ready. `gate` lets one through."""

    def __init__(self, weights, options):
        super().__init__(weights, options)
        self.ready, self.begun, self.gate = 0, threading.Event(), threading.Event()
        self.gate.set()

    def make_ready(self):
        assert not self.inside, "a request runs"
        self.begun.set()
        assert self.gate.wait(30)
        assert not self.closed
        self.ready += 1
        return self.ready < PARTS


class Unlucky(InParts):
    def make_ready(self):
        super().make_ready()
        raise RuntimeError("no memory\nis left")


@pytest.fixture
def opened(monkeypatch, folder):
    """Opens an LLM whose quiet moments begin after so many seconds, held by `gate` if that is said."""
    llms = []

    def open_it(quiet_s, backend=InParts, held=False):
        monkeypatch.setattr(engine, "QUIET_S", 60.0)
        llms.append(llm := LLM(folder, backend=backend, num_slots=2))
        if held:
            llm.engine.backend.gate.clear()
        monkeypatch.setattr(engine, "QUIET_S", quiet_s)
        assert llm.generate("a", GREEDY)[0].outputs[0].text == cold(folder, "a").text
        return llm, llm.engine.backend

    yield open_it
    for llm in llms:
        llm.engine.backend.gate.set()
        llm.close()


def until(true):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_all_parts_are_made_ready_once_nobody_asks(opened):
    llm, backend = opened(0.01)
    until(lambda: backend.ready == PARTS)
    until(lambda: llm.engine._thread is None)  # and the thread ends as it would without
    llm.generate("b", GREEDY)
    time.sleep(0.1)
    assert backend.ready == PARTS


def test_it_needs_no_request(monkeypatch, folder):
    monkeypatch.setattr(engine, "QUIET_S", 0.0)
    with LLM(folder, backend=InParts) as llm:
        until(lambda: llm.engine.backend.ready == PARTS)


def test_a_request_is_not_kept_waiting_by_what_is_not_begun(opened):
    llm, backend = opened(0.01, held=True)
    assert backend.begun.wait(30)
    stream = llm.stream("b", GREEDY)
    assert stream.poll(0.1) is None and backend.ready == 0  # one part is at work
    backend.gate.set()
    text = "".join(delta.text for delta in stream)
    assert text and backend.ready >= 1
    until(lambda: backend.ready == PARTS)


def test_a_command_that_ends_at_once_makes_nothing_ready(opened):
    llm, backend = opened(60.0)
    llm.close()
    assert backend.ready == 0 and backend.closed


def test_nothing_is_begun_once_it_closes(opened):
    llm, backend = opened(0.01, held=True)
    assert backend.begun.wait(30)
    closing = threading.Thread(target=llm.close, daemon=True)
    closing.start()
    until(lambda: llm.engine.closed)
    backend.gate.set()
    closing.join(30)
    assert backend.closed and backend.ready == 1


def test_a_pause_waits_for_the_part_at_work_alone(opened):
    llm, backend = opened(0.01, held=True)
    assert backend.begun.wait(30)
    entered = threading.Event()

    def pause():
        with llm.engine.paused():
            entered.ready = backend.ready
            entered.set()

    threading.Thread(target=pause, daemon=True).start()
    assert not entered.wait(0.1)
    until(lambda: llm.engine._paused)
    backend.gate.set()
    assert entered.wait(30) and entered.ready == 1


def test_what_fails_is_said_once_and_requests_are_served(opened, caplog):
    llm, backend = opened(0.01, Unlucky)
    until(lambda: llm.engine._unready is None)
    assert caplog.messages == ["what makes later requests faster failed: no memory is left"]
    assert llm.generate("b", GREEDY)[0].outputs[0].text
    assert backend.ready == 1
