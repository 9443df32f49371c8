"""The heartbeat of a kernel that serves: waits on the GPU are bounded, so that silence means it no longer runs.

A kernel counts its steps in a word that the host reads; `Heart.listen` is told it and raises Stalled, a DeviceError,
once it has not changed for SILENCE_S.
"""

import time

from kog_triton.errors import DeviceError

SILENCE_S = 30.0


class Stalled(DeviceError):
    """The GPU no longer answers: what it was given must not be waited for."""


class Heart:
    """The heartbeat of one launch, which begins."""

    def __init__(self) -> None:
        self._steps, self._since = 0, time.monotonic()

    def listen(self, steps: int) -> None:
        if steps != self._steps:
            self._steps, self._since = steps, time.monotonic()
        elif time.monotonic() - self._since > SILENCE_S:
            raise Stalled(
                f"the GPU has not finished a step in {SILENCE_S:.0f} s: end this process and look at "
                "the driver's log"
            )
