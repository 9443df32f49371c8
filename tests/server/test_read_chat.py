"""What a conversation's request becomes: roles, parts, lengths, and where the shape of its answer begins."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from kog_triton.errors import RequestError, TooLong
from kog_triton.server import asked
from kog_triton.server.asked import read_chat, render
from kog_triton.server.pacing import Interval
from kog_triton.server.problems import Problem
from kog_triton.server.schemas.chat import ChatBody, Message
from kog_triton.server.schemas.messages import MessagesBody
from kog_triton.server.schemas.responses import chat_messages
from kog_triton.server.schemas.tokens import TokenizeBody
from kog_triton.server.service import Service


class FakeTokenizer:
    """Notes the conversations that it is given; each ends with `said`, and `opening` opens the answer."""

    def __init__(self, said="", opening=""):
        self.given, self.said, self.opening = [], said, opening
        self.chat_templates = {"default": ""}

    def encode_chat(self, messages, **how):
        self.given.append(messages)
        return [1]

    def decode(self, ids, skip_special_tokens):
        return self.said + self.opening

    def render_chat(self, messages, add_generation_prompt, **how):
        return self.said + self.opening * add_generation_prompt


def asked_of(tokenizer, **fields):
    """What a request becomes for a model that reasons."""
    model = SimpleNamespace(
        tokenizer=tokenizer, reasons=True, tool_parser="hermes", knows_tools=True, template_kwargs={},
        opened=SimpleNamespace(max_context=64), default_params=lambda **given: given,
    )  # fmt: skip
    service = SimpleNamespace(model=model, interval=Interval(), check_length=lambda characters: None)
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}]} | fields)
    return asyncio.run(read_chat(service, body, ""))


def test_a_developer_s_message_is_the_system_s_where_the_template_knows_none():
    """OpenAI's newer name. Parts are told by their text alone, which `render` joins."""
    tokenizer = FakeTokenizer()
    parts = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "input_text", "text": "b"}]
    asked_of(tokenizer, messages=[{"role": "developer", "content": "German"}, {"role": "user", "content": parts}])
    ((first, second),) = tokenizer.given
    assert first == {"role": "system", "content": "German"}
    assert second["content"] == [{"type": "text", "text": t} for t in "ab"]
    tokenizer.chat_templates = {"default": "{% if message.role == 'developer' %}"}
    asked_of(tokenizer, messages=[{"role": "developer", "content": "German"}])
    assert tokenizer.given[-1][0]["role"] == "developer"


def test_a_role_is_openai_s_or_the_template_s_own():
    tokenizer = FakeTokenizer()
    for role in asked.ROLES:
        asked_of(tokenizer, messages=[{"role": role, "content": ""}])
    own = {"messages": [{"role": "document", "content": ""}]}
    with pytest.raises(Problem, match=r"messages\[0\].role is 'document': it must be one of deve"):
        asked_of(tokenizer, **own)
    tokenizer.chat_templates = {"default": '{% if message.role == "document" %}'}
    asked_of(tokenizer, **own)
    assert tokenizer.given[-1][0]["role"] == "document"
    tokenizer.chat_templates = {}
    with pytest.raises(RequestError, match=r"ask /v1/completions, or .* with --chat-template"):
        asked_of(tokenizer)


@pytest.mark.parametrize(
    ("said", "opening", "opens"),
    [("", "<|assistant|>\n<think>\n", True), ("What is <think>?", "<|assistant|>\n", False),
     ("", "<think>\n\n</think>\n\n", False), ("<think>?", "<|assistant|><think>\nFirst,", True)],
)  # fmt: skip
def test_a_shape_begins_behind_reasoning_that_the_prompt_has_opened(said, opening, opens):
    """The template may begin it with words; further ahead the tag is a user's. Without a shape nothing else changes."""
    shape, made = {"type": "json_object"}, FakeTokenizer(said, opening)
    asked = asked_of(made, response_format=shape)
    assert asked.inside is opens
    assert asked.job.params["structured_outputs"].behind == ("</think>" if opens else None)
    tools = [{"type": "function", "function": {"name": "f"}}]
    forced = asked_of(made, tools=tools, tool_choice="required")
    assert forced.job.params["structured_outputs"].behind == ("</think>" if opens else None)
    assert "structured_outputs" not in asked_of(made).job.params
    if opens and said:  # no answer is begun
        assert not asked_of(FakeTokenizer(opening), add_generation_prompt=False).inside


def test_a_length_is_looked_at_ahead_of_the_template_and_counting_has_no_other_bound():
    """Of all parts' texts; what is only counted may be longer than the context."""
    tokenizer, service = FakeTokenizer(), Service(None, None, None, Interval(), 0)
    service.opened = SimpleNamespace(opened=SimpleNamespace(max_context=1), tokenizer=tokenizer)
    long = [{"type": "text", "text": "x" * 32}, {"type": "text", "text": "x" * 33}]
    with pytest.raises(TooLong, match="the prompt has 65 characters"):
        asyncio.run(render(service, [Message(role="user", content=long)], (), True, {}))
    assert tokenizer.given == []
    fits = [Message(role="user", content=long[:1])]
    assert asyncio.run(render(service, fits, (), True, {}, bounded=False)) == [1]


def test_a_long_conversation_is_made_plain_beside_the_event_loop(monkeypatch):
    """65,536 messages take 0.2 s; more are not read."""
    plain, places = asked._plain, []
    monkeypatch.setattr(asked, "_plain", lambda *told: places.append(threading.current_thread()) or plain(*told))
    asked_of(FakeTokenizer("", "<think>\nSo"))
    assert places and threading.main_thread() not in places
    with pytest.raises(ValidationError, match="at most 65536 items"):
        TokenizeBody(messages=[{"role": "user", "content": ""}] * 65537)


BLOCKS = [{"type": "text", "text": t} for t in "ab"]


def test_texts_of_other_forms_are_a_chat_s_parts_but_an_assistant_s_are_one():
    result = {"type": "tool_result", "tool_use_id": "1", "content": BLOCKS}
    thoughts = [{"type": "thinking", "thinking": t} for t in "xy"]
    messages = [
        {"role": "user", "content": BLOCKS},
        {"role": "assistant", "content": [*thoughts, *BLOCKS]},
        {"role": "user", "content": [result, BLOCKS[0]]},
    ]
    body = MessagesBody.model_validate({"model": "m", "max_tokens": 1, "messages": messages}).chat()
    said = [message.model_dump(exclude_none=True) for message in body.messages]
    assert [one["content"] for one in said] == [BLOCKS, "ab", BLOCKS, "a"]
    assert said[1]["reasoning_content"] == "xy"


def test_texts_of_input_items_are_a_chat_s_parts_but_an_assistant_s_are_one():
    items = [
        {"role": "developer", "content": "d"},  # `render` asks the template whether it knows that role
        {"role": "user", "content": BLOCKS},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": t} for t in "xy"]},
        {"role": "assistant", "content": BLOCKS},
        {"type": "function_call_output", "call_id": "1", "output": BLOCKS},
    ]
    said = chat_messages(items)
    assert [one["content"] for one in said] == ["d", BLOCKS, "ab", BLOCKS]
    assert said[0]["role"] == "developer" and said[2]["reasoning_content"] == "xy"
