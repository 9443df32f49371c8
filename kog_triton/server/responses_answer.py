"""An answer as /v1/responses tells it: items of reasoning, text and calls, each opened, filled and closed."""

import secrets
import time
from typing import Any

from kog_triton.outputs import RequestOutput
from kog_triton.server.answering import sse
from kog_triton.server.asked import Asked
from kog_triton.server.block_stream import BlockStream
from kog_triton.server.figures import timings, usage
from kog_triton.server.model import ServedModel
from kog_triton.server.problems import Problem
from kog_triton.server.schemas.responses import ResponsesBody
from kog_triton.server.told import Told, call_id
from kog_triton.text.tool_calls import ToolCall


class ResponsesAnswer(BlockStream):
    REASONING, TEXT = "reasoning", "message"

    def __init__(self, answer_id: str, model: ServedModel, asked: Asked, body: ResponsesBody) -> None:
        self._id, self._model, self._asked, self._body = answer_id, model, asked, body
        self._created = int(time.time())
        super().__init__(Told(asked.parser()))
        self._items: list[dict[str, Any]] = []  # the last one may be open
        self._pieces: list[str] = []  # of the open item's text
        self._number = 0

    # ---- a stream ----

    def begin(self) -> bytes:
        response = self._response("in_progress")
        self._say("response.created", response=response)
        self._say("response.in_progress", response=response)
        return self._take_events()

    def last(self) -> bytes:
        status = self._status()
        self._say(f"response.{status}", response=self._response(status))
        return self._take_events()

    def error(self, problem: Problem) -> bytes:
        error = {"code": "server_error", "message": problem.message}
        self._say("response.failed", response=self._response("failed") | {"error": error})
        return self._take_events()

    def error_body(self, problem: Problem) -> dict[str, Any]:
        return problem.body()

    def _say(self, kind: str, **fields: Any) -> None:
        self._events.append(sse({"type": kind, "sequence_number": self._number, **fields}, kind))
        self._number += 1

    # ---- items ----

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _add_text(self, kind: str, text: str) -> None:
        if not self._open or self._items[-1]["type"] != kind:
            self._close()
            self._open_item(kind)
        self._pieces.append(text)
        if kind == "message":
            self._say("response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=[])
        else:
            self._say("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _open_item(self, kind: str) -> None:
        item: dict[str, Any] = {"type": kind, "status": "in_progress", "content": []}
        if kind == "message":
            item |= {"id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
        else:
            item |= {"id": f"rs_{secrets.token_hex(12)}", "summary": []}
        self._items.append(item)
        self._open, self._pieces = True, []
        self._say("response.output_item.added", output_index=len(self._items) - 1, item=item)
        self._say("response.content_part.added", **self._place(), content_index=0, part=_part(kind, ""))

    def _close(self, cut: bool = False) -> None:
        if not self._open:
            return
        item, text = self._items[-1], "".join(self._pieces)
        part = _part(item["type"], text)
        if item["type"] == "message":
            self._say("response.output_text.done", **self._place(), content_index=0, text=text, logprobs=[])
        else:
            self._say("response.reasoning_text.done", **self._place(), content_index=0, text=text)
        self._say("response.content_part.done", **self._place(), content_index=0, part=part)
        status = "incomplete" if cut else "completed"
        self._items[-1] = item | {"status": status, "content": [part]}
        self._say("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])
        self._open = False

    def _add_call(self, call: ToolCall) -> None:
        number = sum(item["type"] == "function_call" for item in self._items)
        item = {
            "type": "function_call",
            "id": f"fc_{secrets.token_hex(12)}",
            "call_id": call_id(self._id, 0, number),
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        self._items.append(item)
        opened = item | {"arguments": "", "status": "in_progress"}
        self._say("response.output_item.added", output_index=len(self._items) - 1, item=opened)
        self._say("response.function_call_arguments.delta", **self._place(), delta=call.arguments)
        self._say("response.function_call_arguments.done", **self._place(), name=call.name, arguments=call.arguments)
        self._say("response.output_item.done", output_index=len(self._items) - 1, item=item)

    # ---- the answer ----

    def whole(self) -> dict[str, Any]:
        return self._response(self._status())

    def _status(self) -> str:
        return "incomplete" if self._told.finish_reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._asked.job.params
        output = self._told.output
        form = body.text.format if body.text and body.text.format else None
        found = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model.name,
            "output": list(self._items),
            "parallel_tool_calls": not self._asked.one_call,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": form.model_dump(by_alias=True) if form else {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.functions,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
        }
        if output is not None and status != "in_progress":
            found |= {"usage": self._usage(output), "timings": timings(output)}
        return found

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        ids = output.outputs[0].token_ids
        thought = self._model.reasoning_tokens(ids) if any(self._told.reasoning) else 0
        counted = usage([(0, output)], 1, thought)
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": counted["prompt_tokens"] - cached},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": counted["completion_tokens_details"],
            "total_tokens": counted["total_tokens"],
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
