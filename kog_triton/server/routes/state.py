"""How the server is: alive, ready, which model, what it counted."""

import time
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kog_triton import __version__
from kog_triton.server.json_body import JsonRoute
from kog_triton.server.problems import Problem
from kog_triton.server.schemas.answers import ModelCard, Models, Props, Status, Version, answers
from kog_triton.server.service import Service

router = APIRouter(route_class=JsonRoute)
STARTED = int(time.time())
STATUS: dict[int | str, dict[str, Any]] = {200: {"model": Status}, 503: {"model": Status}}


def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


@router.get("/health", operation_id="health", response_model=None, responses=STATUS)
async def health(request: Request) -> Response:
    """200 while the engine lives and goes on, 503 while it does not."""
    supervisor = _service(request).supervisor
    alive = supervisor.state == "ready"
    told = {"status": "ok" if alive else supervisor.state}
    return JSONResponse(told, 200 if alive else 503, None if alive else {"Retry-After": "1"})


@router.get("/ready", operation_id="ready", response_model=None, responses=STATUS)
async def ready(request: Request) -> Response:
    """200 while new requests are taken, 503 while the model loads, restarts, or the server drains."""
    service = _service(request)
    if service.admission.draining:
        return JSONResponse({"status": "draining"}, 503)
    return await health(request)


@router.get("/v1/models", operation_id="models", response_model=None, responses=answers(Models))
async def models(request: Request) -> dict[str, Any]:
    """The model, under each of its names."""
    model = _service(request).model
    return {"object": "list", "data": [_card(request, name) for name in model.names]}


@router.get("/v1/models/{name:path}", operation_id="model", response_model=None, responses=answers(ModelCard))
async def model(request: Request, name: str) -> dict[str, Any]:
    """One model; 404 for a name that is not served."""
    service = _service(request)
    if name not in service.model.names:
        raise Problem(404, f"no model {name[:100]!r} here", code="model_not_found", param="model")
    return _card(request, name)


def _card(request: Request, name: str) -> dict[str, Any]:
    opened = _service(request).model.opened
    return {
        "id": name,
        "object": "model",
        "created": STARTED,
        "owned_by": "kog_triton",
        "root": opened.folder.rpartition("/")[2],
        "max_model_len": opened.max_context,
    }


@router.get("/version", operation_id="version", response_model=None, responses={200: {"model": Version}})
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/props", operation_id="props", response_model=None, responses=answers(Props))
async def props(request: Request) -> dict[str, Any]:
    """What llama.cpp's clients ask, and how this server was opened."""
    service = _service(request)
    model, supervisor = service.model, service.supervisor
    opened = model.opened
    return {
        "default_generation_settings": {"n_ctx": opened.max_context, "params": opened.generation},
        "total_slots": opened.num_slots,
        "model_path": opened.folder,
        "model_alias": model.name,
        "chat_template": model.tokenizer.chat_templates.get("default"),
        "build_info": f"kog_triton {__version__}",
        "backend": {"name": opened.backend, "reason": opened.reason},
        "gpu": opened.gpu,
        "memory_bytes": await supervisor.memory_bytes(),
        "kv_cache_bound_bytes": opened.kv_bound_bytes,
        "tool_call_parser": model.tool_parser,
        "reasoning": model.reasons,
        "slots_running": supervisor.num_running,
        "requests_waiting": supervisor.num_waiting,
        "stream_interval": {"ms": service.interval.seconds * 1e3, "tokens": service.interval.tokens},
    }


@router.get("/metrics", operation_id="metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus's text."""
    registry = CollectorRegistry()
    registry.register(_service(request).metrics)
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
