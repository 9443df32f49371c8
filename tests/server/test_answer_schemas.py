"""Answers and every event of streams are what OpenAI's and Anthropic's own types say, checked strictly.

The clients build their objects without looking; here pydantic validates: a field that is missing, or of another type,
is red. What their types do not know, as `timings`, is ours.
"""

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.lib.served import read_events

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ANSWER = f"<think>hm</think>Yes. {CALL}"
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {"name": "f", "parameters": PARAMETERS}
FLAT = {"type": "function", **FUNCTION, "strict": False}


def bodies(server):
    prompt = server.play("typed", ANSWER)
    messages = [{"role": "user", "content": prompt}]
    tools = [{"type": "function", "function": FUNCTION}]
    logprobs = {"logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1}
    usage = {"stream_options": {"include_usage": True}}
    chat = {"messages": messages, "tools": tools, **logprobs}
    claude = {"messages": messages, "max_tokens": 200}
    claude["tools"] = [{"name": "f", "input_schema": PARAMETERS}]
    return {
        "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk, chat, usage),
        "/v1/completions": (Completion, Completion, {"prompt": prompt, "logprobs": 2}, usage),
        "/v1/responses": (Response, ResponseStreamEvent, {"input": prompt, "tools": [FLAT]}, {}),
        "/v1/messages": (Message, RawMessageStreamEvent, claude, {}),
    }


PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_is_of_its_apis_type(server, path):
    kind, _, body, _ = bodies(server)[path]
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    TypeAdapter(kind).validate_json(response.text)
    assert "timings" in response.json()


@pytest.mark.parametrize("interval", [1, 5])
@pytest.mark.parametrize("path", PATHS)
def test_every_event_of_a_stream_is_of_its_apis_type(server, path, interval):
    _, kind, body, extra = bodies(server)[path]
    types = TypeAdapter(kind)
    body = body | extra | {"stream": True, "stream_interval": interval}
    with server.client() as client, client.stream("POST", path, json=body) as response:
        events = [event for event in read_events(response) if event != "[DONE]"]
    assert len(events) >= 5
    for event in events:
        if kind is Completion:  # null until the end by OpenAI's description, which the type does not know
            for choice in event["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
        types.validate_json(json.dumps(event))


def test_models_are_of_their_type(server):
    for model in server.get("/v1/models").json()["data"]:
        Model.model_validate(model)


def test_the_types_are_strict(server):
    """A gate that takes anything is none."""
    answer = server.chat(server.play("typed", "x"))
    ChatCompletion.model_validate(answer)
    for broken in ({"choices": [{}]}, {"created": "now"}, {"id": None}):
        with pytest.raises(ValueError):
            ChatCompletion.model_validate(answer | broken)
