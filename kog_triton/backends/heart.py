"""The heartbeat of a kernel that serves: waits on the GPU are bounded, so that silence means it no longer runs.

A kernel counts its steps in a word that the host reads; `Heart.listen` is told it and raises Stalled, a DeviceError,
once it has not changed for SILENCE_S. Before it begins the GPU may have prompts to run that take longer.
"""

import time
from collections.abc import Callable

import torch

from kog_triton.errors import DeviceError

SILENCE_S = 30.0


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


class Heart:
    """The heartbeat of one launch, which starts once `begun` says so; `ended` says when it is over."""

    def __init__(self, begun: Callable[[], bool], ended: Callable[[], bool]) -> None:
        self._begun, self._ended = begun, ended
        self._steps, self._since = 0, time.monotonic()

    def restart(self) -> None:
        """The host has not listened for a while."""
        self._since = time.monotonic()

    def listen(self, steps: int) -> None:
        if steps != self._steps or not self._begun():
            self._steps, self._since = steps, time.monotonic()
        elif time.monotonic() - self._since > SILENCE_S:
            raise Stalled(
                f"the GPU has not finished a step in {SILENCE_S:.0f} s: open a new LLM or, if that is "
                "refused, start a new process; the driver's log may say why",
                self._ended,
            )
