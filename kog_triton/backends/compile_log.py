"""What is said of a compiler inside a launch: nothing if it is quick, else that it compiles, and how long it took.

Triton compiles a kernel when it is first launched, in the middle of a request: 11 to 48 s of a model of 1B to 8B. Who
watches a backend's heartbeat must not take that for a device that hangs: see `compiling`.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("kog_triton.compilers")
QUICK_S = 0.3  # a kernel that was kept is loaded by then
_inside: list[str] = []  # what is being compiled


def compiling() -> bool:
    """Whether a launch of this process waits for a compiler."""
    return bool(_inside)


@contextmanager
def waited_for(what: str) -> Iterator[None]:
    """Around a wait of a launch for a compiler."""
    _inside.append(what)
    try:
        yield
    finally:
        _inside.remove(what)


@contextmanager
def told_if_slow(what: str) -> Iterator[None]:
    """Around what may compile `what`."""
    begun, slow = time.perf_counter(), threading.Event()

    def tell() -> None:
        slow.set()
        log.info("compiling %s, once for this model", what)

    timer = threading.Timer(QUICK_S, tell)
    timer.daemon = True  # it does not outlive Python
    timer.start()
    try:
        with waited_for(what):
            yield
    finally:
        timer.cancel()
        timer.join()
    if slow.is_set():
        log.info("compiled %s in %.1f s", what, time.perf_counter() - begun)
