"""How every command ends: one line on stderr for an error, and an exit code that says what kind.

    0 done   1 a bug of ours   2 usage or request   3 model   4 device   5 run failed   130 Ctrl-C

KOG_DEBUG=1 shows the traceback of any of them. A reader that closes our stdout ends us quietly.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from kog_triton.errors import DeviceError, KogError, printable

INTERRUPTED = 130


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
        # Python flushes stdout once more as it exits: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except KogError as error:
        return _say(f"error: {error}", error.exit_code)
    except MemoryError as error:
        return _say(f"error: out of memory: {error}", DeviceError.exit_code)
    except Exception as error:
        return _say(f"error: {type(error).__name__}: {error} (KOG_DEBUG=1 shows where)", 1)


def _say(line: str, code: int) -> int:
    if os.environ.get("KOG_DEBUG") == "1":
        traceback.print_exc()
    print(printable(" ".join(line.split())), file=sys.stderr)  # a checkpoint may have a part in it
    return code
