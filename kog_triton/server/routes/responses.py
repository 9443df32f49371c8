"""Conversations in OpenAI's newer form."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from kog_triton.server.answering import Renderer
from kog_triton.server.asked import read_chat
from kog_triton.server.json_body import JsonRoute
from kog_triton.server.pacing import Interval
from kog_triton.server.responses_answer import ResponsesAnswer
from kog_triton.server.routes.generation import answer, namespace_of, new_id
from kog_triton.server.samples import Job
from kog_triton.server.schemas.answers import ResponseObject, answers
from kog_triton.server.schemas.responses import ResponsesBody
from kog_triton.server.service import Service

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/responses", operation_id="responses", response_model=None, responses=answers(ResponseObject, stream=True)
)
async def responses(request: Request, body: ResponsesBody) -> Response:
    """Answer a conversation; nothing is stored."""
    service: Service = request.app.state.service
    service.check_name(body.model)

    async def prepare() -> tuple[list[Job], Interval, Renderer]:
        asked = await read_chat(service, body.chat(), namespace_of(request))
        renderer = ResponsesAnswer(new_id("resp"), service.model, asked, body)
        return [asked.job], asked.interval, renderer

    return await answer(service, prepare, stream=bool(body.stream), ignored=body.ignored)
