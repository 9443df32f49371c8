"""How every command ends: one line on stderr for an error, and an exit code that says what kind.

    0 done   1 a bug of ours   2 usage, request, full disk   3 model   4 device   5 run failed   130 Ctrl-C

KOG_DEBUG=1 shows the traceback of any of them. A reader that closes our stdout ends us quietly.
"""

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from kog_triton.errors import DeviceError, KogError, printable

INTERRUPTED = 130


def end_process(main: Callable[[], int]) -> NoReturn:
    """Call a command as all that this process does.

    Until it says `interruptible`, Ctrl-C ends the process on the spot: an exception out of the middle of an import of
    torch or numpy is a traceback, another error, or an abort.
    """
    _replace_handler(signal.default_int_handler, _leave)
    code = main()
    _replace_handler(signal.default_int_handler, _leave)
    threads = sys.modules.get("kog_triton.backends.compiler_threads")  # nothing heavy is imported here
    if threads is not None and threads.running():
        threads.leave(code)  # for what is compiled nobody waits any more
    sys.exit(code)


def interruptible() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt, and what is open is closed."""
    _replace_handler(_leave, signal.default_int_handler)


def _replace_handler(old: Any, new: Any) -> None:
    """A handler of somebody else's stays, as what ignores Ctrl-C in the background does."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGINT) is old:
        signal.signal(signal.SIGINT, new)


def _leave(number: int, frame: object) -> None:
    with suppress(OSError):  # not by Python's own streams, which may be at work
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def run(body: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None) -> int:
    """Call a command's body and turn whatever it raises into an exit code."""
    if sys.stderr is None:  # closed: what belongs there must not go to stdout instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for the life of the process
    if sys.stdout is None:
        return _say("error: standard output is closed", 2)
    try:
        code = body(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _drop_stdout()
        return 0
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except KogError as error:
        return _say(f"error: {error}", error.exit_code)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            return _bug(error)
        _drop_stdout()
        return _say(f"error: {error.strerror}: {error.filename or 'standard output'}", 2)
    except MemoryError as error:
        return _say(f"error: out of memory: {error}", DeviceError.exit_code)
    except Exception as error:
        return _bug(error)


def _bug(error: Exception) -> int:
    return _say(f"error: {type(error).__name__}: {error} (KOG_DEBUG=1 shows where)", 1)


def _drop_stdout() -> None:
    """Python flushes stdout once more as it exits: let that go nowhere."""
    with suppress(OSError, ValueError):  # in a test it has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(line: str, code: int) -> int:
    if os.environ.get("KOG_DEBUG") == "1":
        traceback.print_exc()
    print(printable(" ".join(line.split())), file=sys.stderr)  # a checkpoint may have a part in it
    return code
