"""Texts and conversations as token ids, and back."""

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.concurrency import run_in_threadpool

from kog_triton.engine import check_ids
from kog_triton.server.asked import render, template_kwargs, usable_tools
from kog_triton.server.json_body import JsonRoute
from kog_triton.server.model import ServedModel
from kog_triton.server.problems import Problem
from kog_triton.server.schemas.answers import Text, Tokens, answers
from kog_triton.server.schemas.tokens import DetokenizeBody, TokenizeBody
from kog_triton.server.service import Service

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", operation_id="tokenize", response_model=None, responses=answers(Tokens))
async def tokenize(request: Request, body: TokenizeBody) -> Response:
    """Ids of a text, or of a conversation as the model's template writes it."""
    service: Service = request.app.state.service
    service.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Problem(400, "give prompt or messages, and not both", param="prompt")
    with service.admission.enter():
        if body.messages is not None:
            kwargs = template_kwargs(service.model, body.chat_template_kwargs)
            tools = usable_tools(body.tools)
            ends = body.add_generation_prompt
            ids = await render(service, body.messages, tools, ends, kwargs, bounded=False)
        else:
            special = True if body.add_special_tokens is None else body.add_special_tokens
            ids = await service.encode(body.prompt or "", special, bounded=False)
        pieces = bool(body.return_token_strs)
        told = await run_in_threadpool(_told, service.model, ids, pieces)
    return Response(told, media_type="application/json")


def _told(model: ServedModel, ids: list[int], pieces: bool) -> bytes:
    """Made in a thread: of a long text it takes a second, in which streams would wait."""
    found: dict[str, Any] = {"count": len(ids), "max_model_len": model.opened.max_context, "tokens": ids}
    if pieces:
        found["token_strs"] = [model.piece(token) for token in ids]
    return msgspec.json.encode(found)


@router.post("/detokenize", operation_id="detokenize", response_model=None, responses=answers(Text))
async def detokenize(request: Request, body: DetokenizeBody) -> dict[str, Any]:
    """The text of token ids, special tokens as they are written."""
    service: Service = request.app.state.service
    service.check_name(body.model)
    with service.admission.enter():
        if body.tokens:
            check_ids(body.tokens, service.model.opened.spec.vocab_size)
        text = await run_in_threadpool(service.model.tokenizer.decode, body.tokens, False)
    return {"prompt": text}
