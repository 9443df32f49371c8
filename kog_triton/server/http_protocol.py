"""HTTP/1.1 connections with bounds that uvicorn does not set: of headers, and of the time they take to arrive."""

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADERS = 256
MAX_HEAD_BYTES = 64 << 10  # of request line and headers
ABORT = "kog_abort"  # in a request's scope: ends the connection, with all that waits to be sent
HEAD_S = 10.0  # for them to arrive


class BoundedProtocol(HttpToolsProtocol):
    """431 for too many headers; a connection whose request does not arrive in time is closed."""

    _timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            # the parser stops at the head's end: at most one piece of a body counts too, and no head is cut short
            self._head_bytes += min(len(data), max(data.find(b"\r\n\r\n"), 0) or len(data))
            if self._head_bytes > MAX_HEAD_BYTES:
                return self._refuse()
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort
        if self._timer is None:
            self._wait_for_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refuse()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def _wait_for_head(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(HEAD_S, self._close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self.transport.close()

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()
