"""What is said on stderr beside a text on stdout: a line at a time, and none into the middle of the text.

Both may end on one terminal, and a log may speak at any time: kernels are compiled while the first request runs.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator


def say(line: str) -> None:
    print(line, file=sys.stderr)


class StderrLog(logging.Handler):
    """A log on stderr, in lines like our own; those that come while a text is open wait for its end."""

    _waiting: list[str] | None = None  # None: no text is open

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if self._waiting is None:
            say(line)
        else:
            self._waiting.append(line)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While inside, a text is open: its last line, or a question, may not have ended."""
        waiting: list[str] = []
        self.acquire()  # a line of another thread is out, or waits
        self._waiting = waiting
        self.release()
        try:
            yield
        finally:
            self.acquire()
            try:
                self._waiting = None
                for line in waiting:
                    say(line)
            finally:
                self.release()


STDERR_LOG = StderrLog()
