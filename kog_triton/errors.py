"""Errors that a user can act on: each message is one line that names the item and what to do.

KogError
  ModelError    a checkpoint, its files or its configuration        exit code 3
  DeviceError   no usable device, too little memory, no backend     exit code 4
  RunError      a run that failed: NaN, a wait that expired         exit code 5
  RequestError  a prompt or a parameter of one request              exit code 2; TooLong: for the context
"""


class KogError(Exception):
    """Base of every error that is the user's to fix; `exit_code` is what a command ends with."""

    exit_code = 1


class ModelError(KogError):
    exit_code = 3


class FileError(ModelError):
    """A file of weights that can no longer be read; the message names it."""


class DeviceError(KogError):
    exit_code = 4


class RunError(KogError):
    exit_code = 5


class RequestError(KogError, ValueError):
    exit_code = 2


class TooLong(RequestError):
    """A prompt, or the answer asked for behind it, that the context has no room for."""


def wrong(name: str, value: object, allowed: str) -> RequestError:
    """The error for a field of a request: "NAME is VALUE: it must be ALLOWED"."""
    return RequestError(f"{name} is {shown(value)}: it must be {allowed}")


def shown(value: object) -> str:
    """A value as an error can carry it: one line of at most 80 characters."""
    try:
        return " ".join(repr(value).split())[:80]
    except ValueError:  # an integer of thousands of digits has no decimal form
        return "a huge number"
    except RecursionError:
        return "a deeply nested value"


def printable(text: str, keep: str = "") -> str:
    """Text that drives no terminal: control characters as escapes, but for those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def first_line(error: BaseException | str) -> str:
    """What an error says, as part of a message of one line."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    line = lines[0][:300] if lines else type(error).__name__
    return "".join(c if c.isprintable() else "\ufffd" for c in line)


def is_failure(error: BaseException) -> bool:
    """Whether it says that something failed, not that the process is to end."""
    return isinstance(error, Exception) or is_panic(error)


def is_panic(error: BaseException | None) -> bool:
    """Whether a library in Rust panicked: it raises a BaseException of its own, which cannot be imported."""
    return type(error).__name__ == "PanicException"


def run_error(error: BaseException) -> KogError:
    """What a request raises for an error of its backend."""
    if isinstance(error, KogError):
        return error
    # torch's own error for it, known by name: this module imports no torch
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return DeviceError(f"out of memory: {first_line(error)}: try again, or with a shorter prompt")
    found = RunError(f"the backend failed: {type(error).__name__}: {error}")
    found.__cause__ = error
    return found
