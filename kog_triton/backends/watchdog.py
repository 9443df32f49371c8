"""A GPU that falls silent is found out by its kernel's heartbeat, and its memory stays until its kernel has ended.

A kernel counts its steps in a word that the host reads; `Heart.listen` is told it and raises Stalled, a DeviceError,
once it has not changed for SILENCE_S: waits on the GPU are bounded, so that it no longer runs. Before it begins the
GPU may have prompts to run that take longer; who waits for a slice of one waits no longer than that (`wait_for`).

    Stalled > every entry point refuses > the kernel ends, if ever > the next backend of the process frees the memory

What is queued may still run, and write where it was told to: into the host's memory too, which torch would hand
to whoever pins some next. So neither close() nor the collector frees it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kog_triton.errors import DeviceError

SILENCE_S = 30.0
POLL_S = 1e-4  # between looks whether a slice has ended, behind which a launch is queued


class Stalled(DeviceError):
    """The GPU no longer answers: what it was given must not be waited for. `ended` asks whether it ended after all."""

    def __init__(self, message: str, ended: Callable[[], bool]) -> None:
        super().__init__(message)
        self.ended = ended


def reached(device: torch.device) -> Callable[[], bool]:
    """Asks whether the GPU has done what it has been given until now."""
    if device.type != "cuda":
        return lambda: True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.query


def silent(what: str, ended: Callable[[], bool]) -> Stalled:
    return Stalled(
        f"the GPU has not finished {what} in {SILENCE_S:.0f} s: open a new LLM or, if that is "
        "refused, start a new process; the driver's log may say why",
        ended,
    )


def wait_for(over: Callable[[], bool], what: str, device: torch.device) -> None:
    """Until something that `device` was given is `over`. It has no heartbeat: Stalled after SILENCE_S."""
    until = time.monotonic() + SILENCE_S
    while not over():
        if time.monotonic() > until:
            raise silent(what, reached(device))
        time.sleep(POLL_S)


class Heart:
    """The heartbeat of one launch, which starts once `begun` says so; `ended` says when it is over."""

    def __init__(self, begun: Callable[[], bool], ended: Callable[[], bool]) -> None:
        self._begun, self._ended = begun, ended
        self._steps, self._since = 0, time.monotonic()

    def restart(self) -> None:
        """The host has not listened for a while."""
        self._since = time.monotonic()

    def listen(self, steps: int) -> bool:
        """Whether the launch has gone on since the last call, or has not begun; Stalled if it fell silent."""
        if steps != self._steps or not self._begun():
            self._steps, self._since = steps, time.monotonic()
            return True
        if time.monotonic() - self._since > SILENCE_S:
            raise silent("a step", self._ended)
        return False


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
            "the GPU has not ended what another model of this process gave it: try again later, or start a new process"
        )
