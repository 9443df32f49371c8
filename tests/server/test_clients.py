"""The field's own clients on scripted answers: openai and anthropic for Python."""

import json

import anthropic
import openai
import pytest
from pydantic import BaseModel

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


class City(BaseModel):
    name: str


@pytest.fixture(scope="module")
def oai(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def says(server, name, text, **script):
    return [{"role": "user", "content": server.play(name, text, **script)}]


# ---- openai ----


def test_openai_models(oai):
    (model,) = oai.models.list().data
    assert oai.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        oai.models.retrieve("other")


def test_openai_chat(oai, server):
    answer = oai.chat.completions.create(model="", messages=says(server, "oai", "Hello."), seed=1)
    assert answer.choices[0].message.content == "Hello."
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_openai_stream_with_calls(oai, server):
    """The SDK's own accumulation of events gives the answer that was played."""
    with oai.chat.completions.stream(
        model="", messages=says(server, "oai_call", f"Look: {CALL}"), tools=CHAT_TOOLS
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert answer.choices[0].message.content == "Look: "
    assert answer.choices[0].finish_reason == "tool_calls"
    assert "tool_calls.function.arguments.done" in kinds


def test_openai_parses_a_schema(oai, server):
    answer = oai.chat.completions.parse(
        model="", messages=says(server, "oai_parse", '{"name": "Bern"}'), response_format=City
    )
    assert answer.choices[0].message.parsed == City(name="Bern")


def test_openai_completions(oai, server):
    prompt = server.play("oai_text", "continued", tokens_per_s=1000)
    answer = oai.completions.create(model="", prompt=[prompt, prompt], max_tokens=50, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["continued"] * 2
    assert answer.choices[0].logprobs.tokens[0] == "c"
    pieces = oai.completions.create(model="", prompt=prompt, max_tokens=50, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "continued"


def test_openai_echo_scores_a_prompt_for_each_of_its_samples(oai, server):
    """The engine scores a prompt once."""
    ids = [list(server.play(name, text).encode()) for name, text in (("one", "é"), ("two", "b"))]
    answer = oai.completions.create(model="", prompt=ids, n=2, echo=True, logprobs=1, temperature=1, max_tokens=2)
    scores = [choice.logprobs for choice in answer.choices]
    assert [choice.text for choice in answer.choices] == ["play:oneé"] * 2 + ["play:twob"] * 2
    assert scores[0] == scores[1] != scores[2] == scores[3]
    assert all(len(one.token_logprobs) == 10 and one.token_logprobs[0] is None for one in scores)


def test_openai_echo_scores_a_prompt(oai, server):
    answer = oai.completions.create(model="", prompt="abc", max_tokens=0, echo=True, logprobs=1)
    scored = answer.choices[0].logprobs
    assert answer.choices[0].text == "abc"
    assert scored.tokens == ["a", "b", "c"]
    assert scored.token_logprobs == [None, -0.5, -1.5]
    assert scored.text_offset == [0, 1, 2]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 0)
    assert answer.timings["predicted_n"] == 0


def test_openai_responses(oai, server):
    prompt = server.play("oai_resp", f"<think>hm</think>Yes. {CALL}")
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    answer = oai.responses.create(model="", input=prompt, tools=tools, instructions="Be brief.")
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.output_text == "Yes. "
    assert answer.output[2].arguments == '{"city": "Zürich"}'
    assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>hm</think>")
    events = list(oai.responses.create(model="", input=prompt, tools=tools, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    final = events[-1]
    assert final.type == "response.completed"
    assert [i.type for i in final.response.output] == [i.type for i in answer.output]
    with oai.responses.stream(model="", input=prompt, tools=tools) as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == "Yes. "


def test_openai_responses_take_their_own_output_back(oai, server):
    prompt = server.play("oai_first", CALL)
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    first = oai.responses.create(model="", input=prompt, tools=tools)
    call = first.output[0]
    told = {"type": "function_call_output", "call_id": call.call_id, "output": server.play("oai_next", "Sun.")}
    history = [{"role": "user", "content": prompt}, *(item.to_dict() for item in first.output), told]
    assert oai.responses.create(model="", input=history, tools=tools).output_text == "Sun."


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_openai_responses_that_are_cut_off(oai, server, max_tokens):
    prompt = server.play("oai_cut", "abcdef")
    answer = oai.responses.create(model="", input=prompt, max_output_tokens=max_tokens + 15)
    assert answer.status == answer.output[0].status == "completed"
    answer = oai.responses.create(model="", input=prompt, max_output_tokens=max_tokens)
    *_, done, last = oai.responses.create(model="", input=prompt, max_output_tokens=max_tokens, stream=True)
    assert (done.item.status, last.response.output[0].status) == ("incomplete", "incomplete")
    assert answer.output[0].status == "incomplete"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output_text == "abcdef"[:max_tokens]


def test_openai_errors(oai):
    with pytest.raises(openai.BadRequestError, match="previous_response_id needs a store"):
        oai.responses.create(model="", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="log-probabilities are not told here"):
        oai.responses.create(model="", input="x", top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="input is empty: give a text"):
        oai.responses.create(model="", input=[])
    with pytest.raises(openai.BadRequestError, match="temperature"):
        oai.chat.completions.create(model="", messages=[{"role": "user", "content": "x"}], temperature=5)


# ---- anthropic ----


def test_anthropic_message(claude, server):
    answer = claude.messages.create(
        model=server.get("/v1/models").json()["data"][0]["id"],
        max_tokens=50,
        system=[{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be."}],
        messages=says(server, "claude", "<think>hm</think>Hello."),
    )
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[1].text == "Hello."
    assert answer.stop_reason == "end_turn"


def test_anthropic_stream_of_a_tool_call_and_its_result(claude, server):
    model = server.get("/v1/models").json()["data"][0]["id"]
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    asked = says(server, "claude_call", f"Look: {CALL}")
    with claude.messages.stream(model=model, max_tokens=200, tools=tools, messages=asked) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in answer.content] == ["text", "tool_use"]
    call = answer.content[1]
    assert (call.name, call.input, answer.stop_reason) == ("weather", {"city": "Zürich"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": server.play("claude_next", "Sun.")}
    history = [
        *asked,
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    last = claude.messages.create(model=model, max_tokens=200, tools=tools, messages=history)
    assert last.content[0].text == "Sun."


def test_both_apis_of_others_take_one_call_at_a_time(claude, oai, server):
    model = server.get("/v1/models").json()["data"][0]["id"]
    asked = says(server, "claude_calls", f"{CALL}{CALL}")
    tools = [{"name": "weather", "input_schema": SCHEMA}]
    for alone, count in ((False, 2), (True, 1)):
        choice = {"type": "auto", "disable_parallel_tool_use": alone}
        answer = claude.messages.create(model=model, max_tokens=300, tools=tools, messages=asked, tool_choice=choice)
        assert [block.type for block in answer.content] == ["tool_use"] * count
        found = oai.responses.create(
            model=model,
            input=asked[0]["content"],
            tools=[{"type": "function", "name": "weather", "parameters": SCHEMA}],
            parallel_tool_calls=not alone,
        )
        assert [item.type for item in found.output] == ["function_call"] * count
        assert found.parallel_tool_calls is not alone


def test_anthropic_counts_tokens(claude, server):
    model = server.get("/v1/models").json()["data"][0]["id"]
    counted = claude.messages.count_tokens(model=model, messages=[{"role": "user", "content": "abc"}])
    assert counted.input_tokens == len("[user]abc\n[assistant]")


def test_anthropic_stop_sequence_and_errors(claude, server):
    model = server.get("/v1/models").json()["data"][0]["id"]
    asked = says(server, "claude_stop", "one two")
    answer = claude.messages.create(model=model, max_tokens=9999, stop_sequences=[" "], messages=asked)
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("one", "stop_sequence", " ")
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=1, messages=asked)
    with pytest.raises(anthropic.BadRequestError, match="only text is read"):
        image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}
        claude.messages.create(model=model, max_tokens=1, messages=[{"role": "user", "content": [image]}])
