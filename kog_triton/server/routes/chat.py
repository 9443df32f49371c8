"""Conversations."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from kog_triton.server.answering import Renderer
from kog_triton.server.asked import read_chat
from kog_triton.server.chat_answer import ChatAnswer
from kog_triton.server.json_body import JsonRoute
from kog_triton.server.pacing import Interval
from kog_triton.server.routes.generation import answer, namespace_of, new_id
from kog_triton.server.samples import Job
from kog_triton.server.schemas.answers import ChatCompletion, answers
from kog_triton.server.schemas.chat import ChatBody
from kog_triton.server.service import Service

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    operation_id="chat_completions",
    response_model=None,
    responses=answers(ChatCompletion, stream=True),
)
async def chat_completions(request: Request, body: ChatBody) -> Response:
    """Answer a conversation; with `stream`, as server-sent events."""
    service: Service = request.app.state.service
    service.check_name(body.model)
    options = body.stream_options

    async def prepare() -> tuple[list[Job], Interval, Renderer]:
        asked = await read_chat(service, body, namespace_of(request))
        renderer = ChatAnswer(
            new_id("chatcmpl"),
            service.model,
            asked,
            include_usage=bool(options and options.include_usage),
            continuous=bool(options and options.continuous_usage_stats),
        )
        return [asked.job], asked.interval, renderer

    return await answer(service, prepare, stream=bool(body.stream), ignored=body.ignored)
