"""A compiler inside a launch: it says nothing if it is quick, else that it compiles and how long it took."""

import logging
import re
import threading

import pytest

from kog_triton.backends import compile_log
from kog_triton.backends.compile_log import told_if_slow


class Said(logging.Handler):
    """The lines of a log, and whether one came."""

    def __init__(self):
        super().__init__()
        self.lines, self.came = [], threading.Event()

    def emit(self, record):
        self.lines.append(record.getMessage())
        self.came.set()


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", "kog_triton.compilers")
    log, handler = logging.getLogger("kog_triton.compilers"), Said()
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def test_a_slow_compiler_is_told_of_while_it_runs_and_how_long_it_took(said, monkeypatch):
    monkeypatch.setattr(compile_log, "QUICK_S", 0.01)
    with told_if_slow("the kernel"):
        assert said.came.wait(20)
        assert said.lines == ["compiling the kernel, once for this model"]
    assert len(said.lines) == 2
    assert re.fullmatch(r"compiled the kernel in \d+\.\d s", said.lines[1])


def test_a_kernel_that_was_kept_is_not_told_of(said, monkeypatch):
    monkeypatch.setattr(compile_log, "QUICK_S", 1000.0)
    before = threading.active_count()
    with told_if_slow("the kernel"):
        pass
    assert said.lines == [] and threading.active_count() == before


def test_one_that_fails_says_no_end(said, monkeypatch):
    monkeypatch.setattr(compile_log, "QUICK_S", 0.01)
    with pytest.raises(ZeroDivisionError), told_if_slow("the kernel"):
        assert said.came.wait(20)
        raise ZeroDivisionError
    assert len(said.lines) == 1


def test_who_asks_hears_that_a_launch_waits_for_a_compiler():
    assert not compile_log.compiling()
    with told_if_slow("a kernel"), compile_log.waited_for("another"):
        assert compile_log.compiling()
    assert not compile_log.compiling()
