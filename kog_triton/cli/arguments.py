"""What the commands' command lines share: errors of one line, numbers in range, files that are written."""

import argparse
import math
import os
from pathlib import Path
from typing import Any, NoReturn

from kog_triton.errors import RequestError, printable


class Parser(argparse.ArgumentParser):
    """A wrong usage is one line, not the whole synopsis; a flag is meant by its whole name alone."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **({"allow_abbrev": False} | how))

    def print_help(self, file: Any = None) -> None:
        """argparse's own says nothing of a help that could not be written."""
        print(self.format_help(), end="", file=file, flush=True)

    def error(self, message: str) -> NoReturn:
        if "expected one argument" in message:
            message += ": one that begins with - is given as FLAG=VALUE"
        message = printable(" ".join(message.split()))
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def positive(text: str) -> int:
    """A `type` of argparse: a whole number from 1 on."""
    return natural(text, 1)


def natural(text: str, least: int = 0) -> int:
    """A `type` of argparse: a whole number from 0 on."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from error
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return value


def not_negative(text: str) -> float:
    """A `type` of argparse: a finite number from 0 on."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number from 0 on")
    return value


def above_zero(text: str) -> float:
    """A `type` of argparse: a finite number above 0."""
    if (value := not_negative(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def share(text: str) -> float:
    """A `type` of argparse: a number above 0 and at most 1."""
    value = not_negative(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def check_output(flag: str, file: Path) -> None:
    """RequestError if a file cannot be written: asked before anything is computed for it. - is stdout."""
    if str(file) == "-":
        return
    if file.is_dir():
        raise RequestError(f"{flag} {file}: Is a directory: name a file in it")
    if not file.parent.is_dir():
        raise RequestError(f"{flag} {file}: there is no folder {file.parent}")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise RequestError(f"{flag} {file}: cannot be written: permission denied")
    try:
        if not file.exists():  # some file systems allow a folder's owner no files
            file.touch()
            file.unlink()
    except OSError as error:
        raise RequestError(f"{flag} {file}: cannot be written: {error.strerror}") from error


def write_text(file: Path, text: str, what: str = "") -> None:
    """RequestError if the file cannot be written; `what` it is called, its name by default."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{what or file}: cannot be written: {error.strerror}") from error
