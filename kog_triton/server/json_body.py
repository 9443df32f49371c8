"""Request bodies as JSON: called so, strict, of bounded depth, and read within a bound of time.

pydantic's reader refuses NaN, lone surrogates and bad UTF-8, which json.loads lets in.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pydantic_core
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kog_triton.errors import first_line
from kog_triton.server.problems import Problem

MAX_DEPTH = 64
# That open, in texts too: as many lists take pydantic 0.2 s to read and 0.3 s to validate, in which every stream waits.
# 65,536 messages of a part each have fewer.
MAX_BRACKETS = 1 << 18
LARGE = 1 << 16  # bytes: of the worst body they take 50 ms
BODY_S = 30.0  # for a body to arrive


class JsonRequest(Request):
    async def body(self) -> bytes:
        """Problem 400 for one that does not say it is JSON, as a form of another site's page cannot, 408 for one that
        takes too long."""
        kind = self.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise Problem(
                400,
                f"the content-type is {kind[:80]!r}: send the header content-type: application/json",
                code="invalid_content_type",
            )
        try:
            async with asyncio.timeout(BODY_S):
                return await super().body()
        except TimeoutError as error:
            raise Problem(408, f"the body took more than {BODY_S:.0f} s to arrive") from error
        except ClientDisconnect as error:
            raise Problem(400, "the client left before its body was here") from error

    async def json(self) -> Any:
        """Problem 400 for what is no JSON, or nested too deep. A large one is read in a thread: it takes seconds."""
        body = await self.body()
        return _read(body) if len(body) < LARGE else await asyncio.to_thread(_read, body)


def _read(body: bytes) -> Any:
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        most = f"the body has more than {MAX_BRACKETS} brackets: send less"
        raise Problem(400, most, code="invalid_json")
    try:
        value = pydantic_core.from_json(
            body,
            allow_inf_nan=False,
            cache_strings="keys",  # a client's words are not kept
        )
    except ValueError as error:
        raise Problem(400, f"the body is no JSON: {first_line(error)}", code="invalid_json") from error
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Problem 400 for lists and objects in each other more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += (v for v in item.values() if isinstance(v, dict | list))
            elif isinstance(item, list):
                below += (v for v in item if isinstance(v, dict | list))
        if not below:
            return
        level = below
    raise Problem(400, f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


class JsonRoute(APIRoute):
    """Every route of the server reads its body so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def read(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return read
