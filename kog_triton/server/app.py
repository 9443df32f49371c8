"""The server's application: routes, what is around them, and errors in OpenAI's form."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from kog_triton import __version__
from kog_triton.errors import KogError
from kog_triton.server.json_body import JsonRoute
from kog_triton.server.limits import MAX_BODY, BodyLimit, KeyGuard
from kog_triton.server.problems import Problem, problem_of
from kog_triton.server.routes import chat, completions, messages, playground, responses, state, tokens
from kog_triton.server.service import Service

MAX_ERRORS = 3  # of a body that are told


def make_app(service: Service, keys: Sequence[str] = (), max_body: int = MAX_BODY) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="kog_triton", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.state.service = service
    for routes in (chat, completions, responses, messages, tokens, state, playground):
        app.include_router(routes.router)
    app.add_middleware(BodyLimit, most=max_body)
    app.add_middleware(KeyGuard, keys=keys)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    for kind in (KogError, Exception):
        app.add_exception_handler(kind, _problem)
    return app


def _told(request: Request, problem: Problem) -> Response:
    anthropic = request.url.path.startswith("/v1/messages")
    body = problem.anthropic_body() if anthropic else problem.body()
    return JSONResponse(body, problem.status, problem.headers)


async def _problem(request: Request, error: Exception) -> Response:
    return _told(request, problem_of(error))


async def _invalid(request: Request, error: Exception) -> Response:
    """A body of the wrong shape: which field, and why."""
    assert isinstance(error, RequestValidationError | ValidationError)
    found = error.errors()[:MAX_ERRORS]
    if isinstance(error, RequestValidationError):
        places = [_place(e, error.body) for e in found]
    else:
        places = [".".join(str(part)[:40] for part in e["loc"][:6]) for e in found]
    lines = [f"{place or 'body'}: {e['msg'][:200]}" for place, e in zip(places, found, strict=True)]
    told = "; ".join(dict.fromkeys(lines))
    return _told(request, Problem(400, told, code="invalid_value", param=places[0] or None))


def _place(error: Mapping[str, Any], body: Any) -> str:
    """Where in a body an error is, without the types that pydantic names for a field that may be of several."""
    place = []
    for part in error["loc"][1:7]:  # behind the word "body"
        try:
            body = body[part]
        except (TypeError, KeyError, IndexError):
            if error["type"] != "missing":
                continue
        place.append(str(part)[:40])
    return ".".join(place)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error, Problem):
        return _told(request, error)
    response = _told(request, Problem(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})  # Allow, of 405
    return response
