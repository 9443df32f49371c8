"""Ctrl-C waits for the end of a block, and only what would raise does."""

import os
import signal
import threading

import pytest

from kog_triton.backends.interrupts import interrupts_deferred


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request):
    """A signal that is Ctrl-C in this test."""
    before = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, before)


@pytest.mark.parametrize("times", [1, 2])
def test_it_raises_behind_the_block(number, times):
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_deferred():
            for _ in range(times):
                os.kill(os.getpid(), number)
            done.append("the block")
        done.append("what is behind it")
    assert done == ["the block"]
    assert signal.getsignal(number) is signal.default_int_handler


def test_it_outranks_an_error_of_the_block(number):
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        os.kill(os.getpid(), number)
        raise ValueError


def test_where_none_comes_nothing_is_changed(number):
    with interrupts_deferred():
        pass
    with pytest.raises(ValueError), interrupts_deferred():
        raise ValueError
    assert signal.getsignal(number) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_a_handler_of_somebody_else_s_stays():
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append("inside"))
    try:
        with interrupts_deferred():
            os.kill(os.getpid(), signal.SIGINT)
            assert came == ["inside"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_threads_change_no_handler(number):
    seen = []

    def body():
        with interrupts_deferred():
            seen.append(signal.getsignal(number))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
