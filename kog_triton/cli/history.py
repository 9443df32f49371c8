"""What was typed into `--interactive`, kept for the next time where it has a line editor."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_LINES = 1000


@contextlib.contextmanager
def kept_lines() -> Iterator[None]:
    """While inside, input() edits lines and knows those of before; afterwards they are kept, for the user alone."""
    try:
        import readline
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    file = history_file()
    with contextlib.suppress(OSError):
        if file is not None:
            readline.read_history_file(file)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch(mode=0o600)
                readline.set_history_length(MOST_LINES)
                readline.write_history_file(file)


def history_file() -> Path | None:
    """$XDG_STATE_HOME/kog_triton/history, or ~/.local/state/...; None for a user without a home."""
    try:
        base = os.environ.get("XDG_STATE_HOME")
        return (Path(base) if base else Path.home() / ".local/state") / "kog_triton" / "history"
    except RuntimeError:
        return None
