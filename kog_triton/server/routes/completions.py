"""Texts to continue."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kog_triton.engine import check_ids
from kog_triton.server.answering import Renderer
from kog_triton.server.completion_answer import CompletionAnswer
from kog_triton.server.json_body import JsonRoute
from kog_triton.server.pacing import Interval
from kog_triton.server.problems import Problem
from kog_triton.server.routes.generation import answer, namespace_of, new_id
from kog_triton.server.samples import Job
from kog_triton.server.schemas.answers import Completion, answers
from kog_triton.server.schemas.completions import MAX_PROMPTS, CompletionBody
from kog_triton.server.schemas.sampling import MAX_SAMPLES
from kog_triton.server.service import Service

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/completions", operation_id="completions", response_model=None, responses=answers(Completion, stream=True)
)
async def completions(request: Request, body: CompletionBody) -> Response:
    """Continue one text or several; `echo` with `logprobs` and no tokens scores them."""
    service: Service = request.app.state.service
    service.check_name(body.model)
    _check(body)

    async def prepare() -> tuple[list[Job], Interval, Renderer]:
        jobs = [await _job(service, body, prompt, namespace_of(request)) for prompt in body.prompts()]
        renderer = CompletionAnswer(
            new_id("cmpl"),
            service.model,
            jobs,
            echo=bool(body.echo),
            made=body.max_tokens != 0,
            logprobs=body.logprobs is not None,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )
        return jobs, body.interval(service.interval), renderer

    return await answer(service, prepare, stream=bool(body.stream), ignored=body.ignored)


def _check(body: CompletionBody) -> None:
    """Problem 400 for what is not supported, or is too much."""
    if body.suffix is not None:
        raise Problem(400, "suffix is not supported: leave it out", param="suffix")
    if body.best_of not in (None, 1, body.n):
        raise Problem(400, "best_of is not supported: use n", param="best_of")
    prompts = len(body.prompts())
    if not 1 <= prompts <= MAX_PROMPTS or prompts * (body.n or 1) > MAX_SAMPLES:
        raise Problem(400, f"prompt must be 1 to {MAX_PROMPTS} prompts, {MAX_SAMPLES} samples in all", param="prompt")
    if body.max_tokens == 0 and not body.echo:
        raise Problem(400, "max_tokens must be at least 1, or echo true", param="max_tokens")
    if body.stream and body.echo and body.logprobs is not None:
        raise Problem(400, "echo with logprobs is not streamed: leave out stream", param="stream")


async def _job(service: Service, body: CompletionBody, prompt: str | list[int], namespace: str) -> Job:
    model, text = service.model, prompt if isinstance(prompt, str) else None
    found = await service.encode(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
    ids = check_ids(found, model.opened.spec.vocab_size)
    if text is None and body.echo:  # in a thread: a long one takes a while
        text = await asyncio.to_thread(model.tokenizer.decode, ids, skip_special_tokens=False)
    given: dict[str, Any] = body.given() | {"max_tokens": body.max_tokens or 1}
    if body.max_tokens is None:
        del given["max_tokens"]
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo:
            given["prompt_logprobs"] = body.logprobs
    params = model.default_params(**given)
    return Job(text, ids, params, namespace + (body.cache_salt or ""))
