"""An answer as Anthropic's messages API tells it: blocks of thinking, text and tool use, one after the other."""

import json
from typing import Any

from kog_triton.outputs import RequestOutput
from kog_triton.server.answering import sse
from kog_triton.server.asked import Asked
from kog_triton.server.block_stream import BlockStream
from kog_triton.server.figures import timings
from kog_triton.server.model import ServedModel
from kog_triton.server.problems import Problem
from kog_triton.server.told import Told, call_id
from kog_triton.text.tool_calls import ToolCall


class MessagesAnswer(BlockStream):
    REASONING, TEXT = "thinking", "text"

    def __init__(self, answer_id: str, model: ServedModel, asked: Asked) -> None:
        self._id, self._model, self._asked = answer_id, model, asked
        super().__init__(Told(asked.parser()))
        self._blocks: list[dict[str, Any]] = []  # the last one may be open
        self._calls = 0

    # ---- a stream ----

    def begin(self) -> bytes:
        message = self._message() | {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": len(self._asked.job.token_ids), "output_tokens": 0},
        }
        self._say("message_start", message=message)
        return self._take_events()

    def last(self) -> bytes:
        output = self._output()
        self._say("message_delta", delta=self._stop(), usage=_usage(output), timings=timings(output))
        self._say("message_stop")
        return self._take_events()

    def error(self, problem: Problem) -> bytes:
        return sse(problem.anthropic_body(), "error")

    def error_body(self, problem: Problem) -> dict[str, Any]:
        return problem.anthropic_body()

    def _say(self, kind: str, **fields: Any) -> None:
        self._events.append(sse({"type": kind, **fields}, kind))

    # ---- blocks ----

    def _add_text(self, kind: str, text: str) -> None:
        if not self._open or self._blocks[-1]["type"] != kind:
            self._close()
            empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            self._blocks.append(dict(empty))
            self._open = True
            self._say("content_block_start", index=len(self._blocks) - 1, content_block=empty)
        self._blocks[-1][kind] += text
        delta = {"type": f"{kind}_delta", kind: text}
        self._say("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self, cut: bool = False) -> None:
        if self._open:
            self._say("content_block_stop", index=len(self._blocks) - 1)
        self._open = False

    def _add_call(self, call: ToolCall) -> None:
        block = {"type": "tool_use", "id": call_id(self._id, 0, self._calls), "name": call.name}
        self._calls += 1
        self._blocks.append(block | {"input": json.loads(call.arguments)})
        index = len(self._blocks) - 1
        self._say("content_block_start", index=index, content_block=block | {"input": {}})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        self._say("content_block_delta", index=index, delta=delta)
        self._say("content_block_stop", index=index)

    # ---- the answer ----

    def whole(self) -> dict[str, Any]:
        output = self._output()
        told = {"content": self._blocks, "usage": _usage(output), "timings": timings(output)}
        return self._message() | told | self._stop()

    def _message(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model.name}

    def _output(self) -> RequestOutput:
        assert self._told.output is not None, "the sample has ended"
        return self._told.output

    def _stop(self) -> dict[str, Any]:
        reason = self._told.finish_reason
        sequence = self._output().outputs[0].stop_reason
        if reason == "stop" and isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        words = {"length": "max_tokens", "tool_calls": "tool_use"}
        return {"stop_reason": words.get(reason or "", "end_turn"), "stop_sequence": None}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Anthropic counts cached tokens apart."""
    m = output.metrics
    return {
        "input_tokens": m.prompt_tokens - m.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": m.cached_tokens,
        "output_tokens": m.output_tokens,
    }
