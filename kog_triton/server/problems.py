"""What a client is told when something is wrong: a status and OpenAI's error object."""

from typing import Any

from starlette.exceptions import HTTPException

from kog_triton.errors import DeviceError, KogError, ModelError, RequestError, TooLong, first_line
from kog_triton.request_queue import QueueFull
from kog_triton.sampling.params import SamplingParams
from kog_triton.server.supervisor import EngineLost

RETRY_S = 1  # until a place in the queue, or an engine, may be free
MAX_MESSAGE = 1024  # characters: an echo of what was sent must not be larger than what was sent


class Problem(HTTPException):
    """An answer that is an error. `code` is OpenAI's word for it, `param` the field it is about."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry: bool = False
    ) -> None:
        self.message = first_line(message[: 4 * MAX_MESSAGE])[:MAX_MESSAGE]
        self.status, self.code, self.param = status, code, param
        super().__init__(status, self.message, {"Retry-After": str(RETRY_S)} if retry else {})

    @property
    def kind(self) -> str:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        if self.status in kinds:
            return kinds[self.status]
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        """As the messages API has it."""
        kinds = {413: "request_too_large", 503: "overloaded_error"}
        kind = kinds.get(self.status, "api_error" if self.status >= 500 else self.kind)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def problem_of(error: BaseException) -> Problem:
    """What an error of a request means to its client. What is no KogError is a bug of ours, told without details."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, QueueFull):
        return Problem(503, "the queue is full: try again later", code="queue_full", retry=True)
    if isinstance(error, EngineLost):
        return Problem(503, str(error), code="engine_lost", retry=True)
    if isinstance(error, TooLong):  # OpenAI's word, by which agents know that they must shorten
        return Problem(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError | ModelError):
        field = str(error).partition(" ")[0]  # as errors.wrong begins
        param = field if field in SamplingParams.__dataclass_fields__ else None
        return Problem(400, str(error), code="invalid_value", param=param)
    if isinstance(error, DeviceError):  # its memory was not enough for this request, beside the others
        return Problem(503, str(error), code="device_error", retry=True)
    if isinstance(error, KogError):
        return Problem(500, str(error), code="engine_error")
    return Problem(500, "the server failed: its log says where", code="internal_error")
