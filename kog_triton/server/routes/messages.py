"""Conversations in Anthropic's form."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from kog_triton.server.answering import Renderer
from kog_triton.server.asked import read_chat
from kog_triton.server.json_body import JsonRoute
from kog_triton.server.messages_answer import MessagesAnswer
from kog_triton.server.pacing import Interval
from kog_triton.server.routes.generation import answer, namespace_of, new_id
from kog_triton.server.samples import Job
from kog_triton.server.schemas.answers import MessageAnswer, TokenCount, answers
from kog_triton.server.schemas.chat import ChatBody
from kog_triton.server.schemas.messages import Conversation, MessagesBody
from kog_triton.server.service import Service

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/messages",
    operation_id="messages",
    response_model=None,
    responses=answers(MessageAnswer, stream=True, anthropic=True),
)
async def messages(request: Request, body: MessagesBody) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    service.check_name(body.model)

    async def prepare() -> tuple[list[Job], Interval, Renderer]:
        asked = await read_chat(service, body.chat(), namespace_of(request), cut_to_room=True)
        return [asked.job], asked.interval, MessagesAnswer(new_id("msg"), service.model, asked)

    return await answer(service, prepare, stream=bool(body.stream), ignored=body.ignored)


@router.post(
    "/v1/messages/count_tokens",
    operation_id="count_tokens",
    response_model=None,
    responses=answers(TokenCount, anthropic=True),
)
async def count_tokens(request: Request, body: Conversation) -> dict[str, int]:
    """How many tokens a conversation has."""
    service: Service = request.app.state.service
    service.check_name(body.model)
    with service.admission.enter():
        fields = ChatBody.model_validate(body.chat_fields())
        asked = await read_chat(service, fields, namespace_of(request), bounded=False)
    return {"input_tokens": len(asked.job.token_ids)}
