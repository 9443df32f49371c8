"""One engine process, from its start to its end: the socket to it, and how it ended."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import cast

from kog_triton.server import wire

SOCKET_BYTES = 1 << 20  # that may be on their way; tokens that nobody reads yet
KILL_S = 5.0  # for a process to be gone after a SIGKILL: a driver may hold it for a while


class EngineProcess(asyncio.Protocol):
    """told   gets every message of the engine, on the event loop
    gone   is called once, when the socket has ended"""

    def __init__(self, told: Callable[[wire.FromEngine], None], gone: Callable[[], None]) -> None:
        self._told, self._gone = told, gone
        self._frames = wire.Frames()
        self._transport: asyncio.Transport | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, asked: wire.Open) -> None:
        """OSError if the system gives no process."""
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            # In this thread, which lives as long as the server: the child ends with the thread that made it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kog_triton.server.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the server's
            )
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self, sock=ours)
        self.send(asked)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def send(self, message: wire.FromServer) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(wire.frame(message))

    def kill(self) -> None:
        """End it without asking; `gone` follows."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def ended(self) -> int | None:
        """The exit status, once the process is gone; None if it does not go."""
        if self._process is None:
            return None
        waited = 0.0
        while self._process.poll() is None and waited < KILL_S:
            await asyncio.sleep(0.01)
            waited += 0.01
        return self._process.returncode

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no such class

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._told(wire.from_engine.decode(body))

    def connection_lost(self, error: Exception | None) -> None:
        self._gone()
