"""Threads in a compiler of this process, as Triton's is: one that comes back to a Python which has ended aborts the
process (Python before 3.14 unwinds it through the compiler's C++).
"""

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
    """A thread that compiles. A script's end waits for it (engine.py), a command leaves it (cli/command.py)."""
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


def wait() -> None:
    """Until none runs. Ctrl-C ends the process at once."""
    try:
        if running():
            log.warning(
                "a kernel is still compiled: Python ends behind it, and the next start finds it; Ctrl-C leaves it"
            )
        for thread in running():
            thread.join()
    except KeyboardInterrupt:
        leave(128 + signal.SIGINT)
