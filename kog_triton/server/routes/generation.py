"""How every endpoint that generates runs: a place first, then the prompt, then the samples, then the response."""

import secrets
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from starlette.requests import Request

from kog_triton.server.answering import Answer, Renderer
from kog_triton.server.pacing import Interval
from kog_triton.server.samples import Job
from kog_triton.server.service import Service

WHOLE = Interval(seconds=0.05)  # between reads of an answer that is told at its end


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


async def answer(
    service: Service,
    prepare: Callable[[], Awaitable[tuple[list[Job], Interval, Renderer]]],
    *,
    stream: bool,
    ignored: list[str],
) -> Answer:
    """`prepare` makes of the request what runs; it is called once the request has its place."""
    with ExitStack() as stack:
        stack.enter_context(service.admission.enter())
        try:
            jobs, interval, renderer = await prepare()
            service.check_rooms(jobs)
            await service.check_shapes(jobs)
            samples = service.samples(jobs, interval if stream else WHOLE)
            await samples.start()
        except BaseException as error:
            service.metrics.failed(error)
            raise
        stack.callback(samples.cancel)
        return Answer(
            samples,
            renderer,
            service.metrics,
            stack.pop_all(),
            stream=stream,
            keep_alive_s=service.keep_alive_s,
            ignored=ignored,
        )


def namespace_of(request: Request) -> str:
    """Whose keys and values a request may reuse: those of its API key's owner."""
    return str(request.scope.get("kog_namespace", ""))
