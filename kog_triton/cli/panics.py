"""Where tokenizers panics, its Rust code writes lines of its own to stderr, before the error that says the same.

Commands drop those lines. The Python API leaves them: the process's stderr is its program's, whose threads write to it.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from kog_triton.cli.stderr_log import STDERR_LOG
from kog_triton.errors import ModelError, is_panic


@contextlib.contextmanager
def panics_unsaid() -> Iterator[None]:
    """While inside, what libraries write to the process's stderr waits; it is dropped if a panic's ModelError ends it.

    What goes through sys.stderr, as STDERR_LOG's lines do, does not wait. For a command's main thread, at a time when
    no process is started: that would inherit the stderr which waits.
    """
    try:
        own = os.dup(2)
    except OSError:  # closed: there is nothing to hold
        yield
        return
    waiting, panicked = os.memfd_create("stderr"), False
    try:
        with _python_writes_to(own):
            os.dup2(waiting, 2)
            try:
                yield
            except ModelError as error:
                panicked = is_panic(error.__cause__)
                raise
            finally:
                os.dup2(own, 2)
    finally:
        os.lseek(waiting, 0, os.SEEK_SET)
        while not panicked and (said := os.read(waiting, 1 << 16)):
            os.write(2, said)
        os.close(waiting)
        os.close(own)


@contextlib.contextmanager
def _python_writes_to(fd: int) -> Iterator[None]:
    """sys.stderr is of `fd`, if it was of 2 before: a test's is not."""
    before = sys.stderr
    if not _is_of_fd_2(before):
        yield
        return
    before.flush()
    aside = open(  # noqa: SIM115  closed when no other thread writes to it
        fd, "w", 1, encoding=before.encoding, errors=before.errors, closefd=False
    )
    sys.stderr = aside
    try:
        yield
    finally:
        STDERR_LOG.acquire()
        sys.stderr = before
        aside.close()
        STDERR_LOG.release()


def _is_of_fd_2(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 2
    except (AttributeError, OSError, ValueError):
        return False
