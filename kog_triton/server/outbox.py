"""Frames from any thread to the other process, at once where the socket takes them.

A token goes out in the thread that brought it: another thread's wake would cost it 50 us. What the socket has no
room for waits for a thread of its own, so that nobody who sends ever waits.
"""

import contextlib
import socket
import threading

AT_ONCE = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)  # the flags' own | costs a microsecond


class Outbox:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Condition()
        self._waiting = bytearray()
        threading.Thread(target=self._flush, name="kog-outbox", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Never waits; data for a process that is gone is dropped."""
        with self._lock:
            if not self._waiting:
                data = data[self._try(data) :]
            if data:
                self._waiting += data
                self._lock.notify()

    def _try(self, data: bytes) -> int:
        """How many bytes the socket took."""
        try:
            return self._channel.send(data, AT_ONCE)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _flush(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting)
                data = bytes(self._waiting)
            with contextlib.suppress(OSError):
                self._channel.sendall(data, socket.MSG_NOSIGNAL)
            with self._lock:
                del self._waiting[: len(data)]
