"""The response that runs a request: JSON when all is there, or server-sent events as it comes.

The client's disconnect ends the request; a stream that breaks off says why and has no [DONE].
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kog_triton.errors import KogError
from kog_triton.server.http_protocol import ABORT
from kog_triton.server.metrics import ServerMetrics
from kog_triton.server.problems import Problem, problem_of
from kog_triton.server.samples import News, Samples

log = logging.getLogger(__name__)
SEND_S = 30.0  # for a client to read what fills its socket's buffers
encode = msgspec.json.Encoder().encode
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Renderer(Protocol):
    """How one API tells an answer. Bytes are whole server-sent events."""

    def begin(self) -> bytes:
        """What a stream starts with, before there is a token."""

    def take(self, news: list[News]) -> None:
        """What is new, for an answer that is told at its end."""

    def event(self, news: list[News], elapsed_s: float) -> bytes:
        """What is new, at once; none if there is nothing to show yet."""

    def last(self) -> bytes:
        """The end of a stream."""

    def whole(self) -> dict[str, Any]:
        """The answer at its end."""

    def error(self, problem: Problem) -> bytes:
        """The end of a stream that broke off."""

    def error_body(self, problem: Problem) -> dict[str, Any]: ...


def sse(data: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(data) + b"\n\n"


class Events:
    """Server-sent events whose data begin with the same fields, which are encoded once."""

    def __init__(self, head: dict[str, Any]) -> None:
        self._begin = b"data: " + encode(head)[:-1] + b","

    def event(self, fields: dict[str, Any]) -> bytes:
        return self._begin + encode(fields)[1:] + b"\n\n"


class Answer(Response):
    """`entered` holds the request's place; it is left when the response has ended, however it did."""

    def __init__(
        self,
        samples: Samples,
        renderer: Renderer,
        metrics: ServerMetrics,
        entered: ExitStack,
        *,
        stream: bool,
        keep_alive_s: float,
        ignored: list[str],
    ) -> None:
        super().__init__()
        self._samples, self._renderer, self._metrics = samples, renderer, metrics
        self._entered, self._stream, self._keep_alive_s = entered, stream, keep_alive_s
        told = ", ".join(name.encode("ascii", "replace").decode() for name in ignored if name.isprintable())
        self._extra = [(b"x-kog-ignored", told.encode())] if told else []
        self._last_sent, self._sending_since = time.perf_counter(), math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watched = (self._watch(receive), self._watch_sends(scope.get(ABORT)))
        tasks = [asyncio.create_task(one) for one in watched]
        try:
            with self._entered:
                if self._stream:
                    await self._tell_stream(send, tasks)
                else:
                    await self._tell_whole(send)
        finally:
            for task in tasks:
                task.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._samples.cancel()

    async def _watch_sends(self, abort: Callable[[], None] | None) -> None:
        """End the connection of a client that has not read for SEND_S. A timer for each event would cost 5 us."""
        while abort is not None:
            await asyncio.sleep(SEND_S / 10)
            if time.perf_counter() - self._sending_since > SEND_S:
                log.warning("a client did not read its answer for %g s: it is cut off", SEND_S)
                abort()

    async def _tell_whole(self, send: Send) -> None:
        headers = [(b"content-type", b"application/json"), *self._extra]
        status, body = 200, b""
        try:
            async for news in self._samples:
                self._renderer.take(news)
            if self._samples.cancelled:
                return  # nobody is there
            # of a long prompt that is echoed it takes a second, in which streams would wait
            body = await asyncio.to_thread(lambda: encode(self._renderer.whole()))
        except Exception as error:
            problem = self._problem(error)
            status, body = problem.status, encode(self._renderer.error_body(problem))
            headers += [(k.encode(), v.encode()) for k, v in (problem.headers or {}).items()]
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send(send, body)
        await send({"type": "http.response.body", "body": b""})

    async def _tell_stream(self, send: Send, tasks: list[asyncio.Task[None]]) -> None:
        headers = [*STREAM_HEADERS, *self._extra]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self._keep_alive_s > 0:
            tasks.append(asyncio.create_task(self._keep_alive(send)))
        samples, renderer = self._samples, self._renderer
        try:
            if data := renderer.begin():
                await self._send(send, data)
            async for news in samples:
                if data := renderer.event(news, time.perf_counter() - samples.started):
                    await self._send(send, data)
            if samples.cancelled:
                return
            end = renderer.last()
        except Exception as error:
            end = renderer.error(self._problem(error))
        await self._send(send, end)
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, data: bytes) -> None:
        # a keep-alive behind an event that waits has not begun the wait
        self._sending_since = min(self._sending_since, time.perf_counter())
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._sending_since, self._last_sent = math.inf, time.perf_counter()

    async def _keep_alive(self, send: Send) -> None:
        """Comments in a silence, as in a queue: proxies drop connections that say nothing."""
        while True:
            left = self._last_sent + self._keep_alive_s - time.perf_counter()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self._send(send, b": keep-alive\n\n")

    def _problem(self, error: Exception) -> Problem:
        self._metrics.failed(error)
        if not isinstance(error, KogError | Problem):
            log.exception("a request failed")
        self._samples.cancel()
        return problem_of(error)
