"""A claim in the server's process: the engine's words about one sample arrive here.

To `Generation` it is the engine's own claim; only that a cancel has to be sent.
"""

import asyncio
from collections.abc import Callable

from kog_triton.backends.mailbox import Failure, Request, Step
from kog_triton.claim import Claim


class RemoteClaim(Claim):
    """send_cancel  is called once, on the event loop
    gap          gets the seconds between every two tokens
    most         bounds the tokens of one read, the first one's to 1; 0 for no bound"""

    def __init__(
        self,
        request: Request,
        salt: str,
        ended: "Callable[[Claim, list[int]], None]",
        send_cancel: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
        gap: Callable[[float], None],
        most: int = 0,
    ) -> None:
        super().__init__(request, salt, ended, lambda: None)
        self._send_cancel, self._loop, self._most = send_cancel, loop, most
        self._unread: list[Step | Failure] = []
        self._read_some = False
        self.num_unread = 0
        self._gap, self._last_ns = gap, 0
        self.accepted: asyncio.Future[None] = loop.create_future()
        # its error is also the request's: whoever reads hears of it
        self.accepted.add_done_callback(lambda done: done.cancelled() or done.exception())

    def push(self, step: Step | Failure) -> None:
        self.num_unread += 1
        if isinstance(step, Step) and step.token >= 0 and step.device_ns:
            if self._last_ns:
                self._gap((step.device_ns - self._last_ns) / 1e9)
            self._last_ns = step.device_ns
        super().push(step)

    def read(self, timeout: float | None = None) -> list[Step | Failure]:
        found = self._unread + super().read(timeout)
        if self._most:
            most = self._most if self._read_some else 1
            found, self._unread = found[:most], found[most:]
            self._read_some |= bool(found)
        self.num_unread -= len(found)
        return found

    def cancel(self) -> None:
        if not self.cancelled and not self.ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send_cancel)
        super().cancel()
