"""Ctrl-C that waits for the end of a block of threads' locks.

A handler that raises does so between any two steps of the main thread, also inside `threading` and
`concurrent.futures`: a lock stays held, for which a thread then waits for ever, or is released twice, and the interrupt
becomes a RuntimeError.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """A signal that would raise KeyboardInterrupt inside the block raises it at the block's end: keep the block short.

    SIGINT, and SIGTERM where it is handled alike. Other handlers stay; only the main thread is interrupted at all.
    """
    with _deferred(signal.SIGINT), _deferred(signal.SIGTERM):
        yield


@contextmanager
def _deferred(number: int) -> Iterator[None]:
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(number) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []
    try:
        signal.signal(number, lambda number, frame: came.append(number))
        yield
    finally:
        signal.signal(number, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
