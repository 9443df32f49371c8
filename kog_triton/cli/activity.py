"""A line on stderr for what takes long: what it is and for how long, gone when it is over."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from kog_triton.cli.stderr_log import STDERR_LOG

PATIENCE_S = 0.3  # before the line appears
REFRESH_S = 0.2


@contextlib.contextmanager
def activity(what: str, quiet: bool = False) -> Iterator[None]:
    """While inside, a terminal shows `what` and the seconds it has taken; other lines go above it.

    Where stderr is no terminal, one line says `what` when it begins to take long.
    """
    if quiet:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(what, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        STDERR_LOG.show_status("")


def _tell(what: str, over: threading.Event) -> None:
    begun = time.perf_counter()
    if over.wait(PATIENCE_S):
        return
    if not sys.stderr.isatty():
        STDERR_LOG.tell(f"{what} ...")
        return
    while not over.is_set():
        STDERR_LOG.show_status(f"{what}, {time.perf_counter() - begun:.1f} s")
        over.wait(REFRESH_S)
