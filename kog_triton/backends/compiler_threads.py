"""Threads in a compiler of this process, as Triton's is: one that comes back to a Python which has ended aborts the
process (Python before 3.14 unwinds it through the compiler's C++).
"""

import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

log = logging.getLogger(__name__)
NAME = "kog-in-compiler"


def start(compile: Callable[..., object], arguments: Sequence[Any]) -> threading.Thread:
    """A thread that compiles, for which Python's end waits. A command does not: it leaves (cli/command.py)."""
    thread = threading.Thread(target=compile, args=tuple(arguments), name=NAME, daemon=True)
    thread.start()
    return thread


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def leave(code: int) -> NoReturn:
    """End the process by this exit code, while a kernel is compiled: a ptxas that has begun ends later."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(code)


@atexit.register
def _wait() -> None:
    if running():
        log.warning("a kernel is still compiled: Python ends behind it, and the next start finds it; Ctrl-C leaves it")
    try:
        while threads := running():  # what is open may begin another
            threads[0].join()
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
