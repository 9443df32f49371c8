"""An answer as /v1/chat/completions tells it."""

import time
from collections import defaultdict
from typing import Any

from kog_triton.server.answering import Events, sse
from kog_triton.server.asked import Asked
from kog_triton.server.figures import chat_logprobs, progress, timings, usage
from kog_triton.server.model import ServedModel
from kog_triton.server.problems import Problem
from kog_triton.server.samples import News
from kog_triton.server.told import Told, call_id
from kog_triton.text.answer import AnswerDelta


class ChatAnswer:
    """id           of the answer, the same in all its events
    include_usage  whether a stream ends with a chunk of usage; `continuous`: every chunk has it"""

    def __init__(self, answer_id: str, model: ServedModel, asked: Asked, include_usage: bool, continuous: bool) -> None:
        self._id, self._model, self._asked = answer_id, model, asked
        self._include_usage, self._continuous = include_usage, continuous
        self._created = int(time.time())
        self._told: defaultdict[int, Told] = defaultdict(lambda: Told(asked.parser()))
        self._logprobs = asked.job.params.logprobs  # the likeliest to tell; None for no figures
        self._began: set[int] = set()
        self._events = Events(self._head("chat.completion.chunk"))

    # ---- a stream ----

    def begin(self) -> bytes:
        return b""

    def event(self, news: list[News], elapsed_s: float) -> bytes:
        return b"".join(self._chunks(one, elapsed_s) for one in news)

    def _chunks(self, one: News, elapsed_s: float) -> bytes:
        told = self._told[one.index]
        before = len(told.calls)
        delta = told.take(one)
        said = self._delta(one.index, delta, before)
        if not said and told.output is None:
            return b""
        if one.index not in self._began:
            self._began.add(one.index)
            said = {"role": "assistant", "content": None if delta.calls else ""} | said
        choice: dict[str, Any] = {"index": one.index, "delta": said, "finish_reason": None}
        logprobs = None
        if self._logprobs is not None and (said or told.output is not None):
            logprobs, told.logprobs = self._told_logprobs(told), []
            choice["logprobs"] = logprobs
        now = progress(one.tokens, elapsed_s, len(self._asked.job.token_ids))
        chunk = {"choices": [choice], "progress": now}
        if self._continuous:
            chunk["usage"] = self._usage_now(one)
        if told.output is None:
            return self._events.event(chunk)
        events = self._events.event(chunk) if said else b""
        last = {"index": one.index, "delta": {}, "finish_reason": told.finish_reason}
        if self._logprobs is not None:  # of tokens behind the last text, such as the end token
            last["logprobs"] = None if said else logprobs
        end = {"choices": [last], "progress": now, "timings": timings(told.output)}
        return events + self._events.event(end)

    def last(self) -> bytes:
        end = b""
        if self._include_usage:
            end = self._events.event({"choices": [], "usage": self._usage()})
        return end + b"data: [DONE]\n\n"

    def error(self, problem: Problem) -> bytes:
        return sse(problem.body())

    def error_body(self, problem: Problem) -> dict[str, Any]:
        return problem.body()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model.name}

    def _delta(self, index: int, delta: AnswerDelta, first_call: int) -> dict[str, Any]:
        said: dict[str, Any] = {}
        if delta.reasoning:  # under both names that are in use
            said["reasoning_content"] = said["reasoning"] = delta.reasoning
        if delta.content:
            said["content"] = delta.content
        if delta.calls:
            said["tool_calls"] = [
                {"index": number} | self._call(index, number, call.name, call.arguments)
                for number, call in enumerate(delta.calls, first_call)
            ]
        return said

    def _call(self, sample: int, number: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": call_id(self._id, sample, number), "type": "function", "function": function}

    def _usage_now(self, one: News) -> dict[str, Any]:
        prompt = len(self._asked.job.token_ids)
        made = one.tokens
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    # ---- an answer at its end ----

    def take(self, news: list[News]) -> None:
        for one in news:
            self._told[one.index].take(one)

    def whole(self) -> dict[str, Any]:
        return self._head("chat.completion") | {
            "choices": [self._choice(index) for index in sorted(self._told)],
            "usage": self._usage(),
            "timings": timings(self._output(0)),
        }

    def _choice(self, index: int) -> dict[str, Any]:
        told = self._told[index]
        reasoning, content = "".join(told.reasoning), "".join(told.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not told.calls else None,
            "refusal": None,
        }
        if self._asked.reasons:
            message["reasoning_content"] = message["reasoning"] = reasoning or None
        if told.calls:
            message["tool_calls"] = [
                self._call(index, number, call.name, call.arguments) for number, call in enumerate(told.calls)
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._told_logprobs(told),
            "finish_reason": told.finish_reason,
        }

    def _told_logprobs(self, told: Told) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        return chat_logprobs(self._model.tokenizer, told.logprobs, self._logprobs)

    def _output(self, index: int) -> Any:
        output = self._told[index].output
        assert output is not None, "all samples have ended"
        return output

    def _usage(self) -> dict[str, Any]:
        outputs = [(index, self._output(index)) for index in sorted(self._told)]
        thought = sum(
            self._model.reasoning_tokens(output.outputs[0].token_ids)
            for index, output in outputs
            if any(self._told[index].reasoning)
        )
        return usage(outputs, self._asked.job.params.n, thought)
