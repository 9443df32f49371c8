"""What is said on stderr beside a text on stdout: a line at a time, and none into the middle of the text.

Both may end on one terminal, and a log may speak at any time: kernels are compiled while the first request runs.
"""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator

from kog_triton.errors import first_line, printable

CLEAR = "\r\x1b[K"  # a terminal's line, from its beginning


class StderrLog(logging.Handler):
    """A log on stderr, in lines like our own; those that come while a text is open wait for its end.

    Below them stands at most one status, of what takes long: no line, and gone with the next.
    """

    _waiting: list[str] | None = None  # None: no text is open
    _status = ""

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self._say(record.getMessage() + ("" if cause is None else _told(cause)))

    def tell(self, text: str) -> None:
        """Lines of our own."""
        self.acquire()
        try:
            self._say(text)
        finally:
            self.release()

    def show_status(self, text: str) -> None:
        """Put a status in place of the last one, "" for none; only where stderr is a terminal."""
        self.acquire()
        try:
            if self._waiting is None and text != self._status:
                sys.stderr.write(CLEAR + printable(text))
                sys.stderr.flush()
                self._status = text
        finally:
            self.release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While inside, a text is open: its last line, or a question, may not have ended."""
        waiting: list[str] = []
        self.show_status("")
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
                    self._say(line)
            finally:
                self.release()

    def _say(self, text: str) -> None:
        """What a checkpoint or a file name put into a line does not drive the terminal. The lock is held."""
        if self._waiting is not None:
            self._waiting.append(text)
            return
        clear = CLEAR if self._status else ""
        self._status = ""
        sys.stderr.write(f"{clear}{printable(text, keep=chr(10))}\n")


def _told(error: BaseException) -> str:
    """What went wrong and where, on the line of the message; with KOG_DEBUG=1 the traceback below it."""
    if os.environ.get("KOG_DEBUG") == "1":
        return "\n" + "".join(traceback.format_exception(error)).rstrip()
    places = traceback.extract_tb(error.__traceback__)
    where = f" ({places[-1].filename}:{places[-1].lineno})" if places else ""
    return f": {type(error).__name__}: {first_line(error)}{where}"


STDERR_LOG = StderrLog()
say = STDERR_LOG.tell
