"""A backend whose GPU fell silent (heart.py): it serves no more, and its memory stays until its kernel has ended.

    Stalled > every entry point refuses > the kernel ends, if ever > the next backend of the process frees the memory

What is queued may still run, and write where it was told to: into the host's memory too, which torch would hand
to whoever pins some next. So neither close() nor the collector frees it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kog_triton.backends.heart import Stalled
from kog_triton.errors import DeviceError

_lock = threading.Lock()
# Of backends whose kernel had not ended when last seen: asks whether it has; frees what it may write.
_kept: list[tuple[Callable[[], bool], Callable[[], None]]] = []


class Answers:
    """Whether the GPU answers one backend: `check()` at every entry point."""

    def __init__(self) -> None:
        self._silent = False

    def check(self) -> None:
        """DeviceError once the GPU has fallen silent, or while another backend's kernel does not end."""
        if self._silent:
            raise DeviceError(
                "the GPU fell silent in an earlier request and may still write into this model's "
                "memory: open a new LLM or, if that is refused, start a new process"
            )
        with _lock:
            for ended, _ in _kept:
                _demand(ended)

    @contextmanager
    def serving(self, free: Callable[[], None]) -> Iterator[None]:
        """Around requests. If they end in Stalled, `free` is called only when their kernel has ended."""
        self.check()
        try:
            yield
        except Stalled as stalled:
            self._silent = True
            with _lock:
                _kept.append((stalled.ended, free))
            raise

    def close(self, free: Callable[[], None]) -> None:
        """Free the backend's memory, unless a kernel may still write there."""
        if not self._silent:
            free()


def free_what_was_kept() -> None:
    """Of kernels that have ended since; DeviceError if one has not."""
    with _lock:
        while _kept:
            ended, free = _kept[0]
            _demand(ended)
            free()
            del _kept[0]


def _demand(ended: Callable[[], bool]) -> None:
    """DeviceError unless that kernel has ended: what comes next would wait behind it, on whichever GPU."""
    try:
        over = ended()
    except RuntimeError as error:  # torch's, of a GPU that broke off instead
        raise DeviceError(
            f"the GPU broke off what an earlier model of this process gave it, start a new process: {error}"
        ) from error
    if not over:
        raise DeviceError(
            "the GPU has not ended what another model of this process gave it: try again later, or "
            "start a new process"
        )
