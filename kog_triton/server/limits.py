"""What a request may weigh before anybody looks at it, and who may send it: two layers around the routes."""

import hmac
from collections.abc import Sequence
from hashlib import sha256

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kog_triton.server.problems import Problem

MAX_BODY = 32 << 20  # bytes
PUBLIC = frozenset({"/health", "/ready", "/"})
PUBLIC_FOLDER = "/playground/"  # of the page at /, which asks for a key itself


async def refuse(problem: Problem, scope: Scope, send: Send) -> None:
    anthropic = scope["path"].startswith("/v1/messages")
    body = msgspec.json.encode(problem.anthropic_body() if anthropic else problem.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # what is left of the body is not read
    ]
    if problem.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class BodyLimit:
    """413 for a body that is, or turns out to be, larger than `most` bytes."""

    def __init__(self, app: ASGIApp, most: int = MAX_BODY) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        told = dict(scope["headers"]).get(b"content-length", b"0")
        too_large = Problem(413, f"the body is larger than {self._most} bytes", code="body_too_large")
        if not told.isdigit() or len(told) > 18 or int(told) > self._most:
            return await refuse(too_large, scope, send)
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._most:
                raise too_large
            return message

        await self._app(scope, counted, send)


class KeyGuard:
    """401 without one of the keys, on every path but PUBLIC and PUBLIC_FOLDER; known paths or not."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["kog_namespace"] = ""
            if self._digests and not _public(scope["path"]):
                digest = sha256(_key(scope)).digest()
                matches = [hmac.compare_digest(digest, known) for known in self._digests]
                if not any(matches):
                    problem = Problem(401, "no valid API key was sent", code="invalid_api_key")
                    return await refuse(problem, scope, send)
                scope["kog_namespace"] = f"{matches.index(True)}:"
        await self._app(scope, receive, send)


def _public(path: str) -> bool:
    return path in PUBLIC or path.startswith(PUBLIC_FOLDER)


def _key(scope: Scope) -> bytes:
    """Where the two APIs carry it."""
    headers = dict(scope["headers"])
    given: bytes = headers.get(b"authorization", b"")
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
