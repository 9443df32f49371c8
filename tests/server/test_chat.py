"""/v1/chat/completions on scripted answers: what is played is what clients get, however it is cut."""

import json

import pytest

from tests.lib.served import content


def test_an_answer_is_what_was_played(server):
    answer = server.chat(server.play("plain", "Grüße 🙂!"))
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "Grüße 🙂!"
    assert choice["finish_reason"] == "stop"
    made = len("Grüße 🙂!".encode()) + 1
    usage = answer["usage"]
    assert usage["completion_tokens"] == made
    assert usage["total_tokens"] == usage["prompt_tokens"] + made
    timings = answer["timings"]
    assert timings["predicted_n"] == made
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert timings["kv_depth"] == usage["total_tokens"] - 1


def test_a_stream_says_the_same_and_ends_with_usage(server):
    prompt = server.play("stream", "one two three", tokens_per_s=200)
    events = server.stream_chat(prompt, stream_options={"include_usage": True})
    assert content(events) == "one two three"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["timings"]["predicted_n"] == 14
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 14
    counts = [e["progress"]["completion_tokens"] for e in events[:-1]]
    assert counts == sorted(counts)
    times = [e["progress"]["elapsed_ms"] for e in events[:-1]]
    assert times == sorted(times)


def test_an_interval_of_one_is_an_event_a_token(server):
    events = server.stream_chat(server.play("each", "abcdefghij"), stream_interval=1)
    said = [e["choices"][0]["delta"].get("content") for e in events]
    assert said == ["a", *"bcdefghij", None]
    counts = [e["progress"]["completion_tokens"] for e in events]
    assert counts == [*range(1, 11), 11]


def test_tokens_of_one_interval_share_an_event(server):
    """Seven tokens an event, the first alone: 1, 8, 15, and the rest with the end."""
    events = server.stream_chat(server.play("seven", "x" * 20), stream_interval=7)
    assert [e["progress"]["completion_tokens"] for e in events] == [1, 8, 15, 21, 21]


def test_no_event_splits_a_character(server):
    text = "é🙂中a\u0301" * 4
    events = server.stream_chat(server.play("utf8", text), stream_interval=1)
    pieces = [e["choices"][0]["delta"].get("content") or "" for e in events]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_samples_of_one_prompt(server):
    prompt = server.play("three", "abc", tokens_per_s=500)
    answer = server.chat(prompt, n=6, temperature=1)
    assert [c["index"] for c in answer["choices"]] == list(range(6))
    assert {c["message"]["content"] for c in answer["choices"]} == {"abc"}
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["usage"]["prompt_tokens"] == server.chat(prompt)["usage"]["prompt_tokens"]
    events = server.stream_chat(prompt, n=6, temperature=1)
    assert [content(events, index=i) for i in range(6)] == ["abc"] * 6


def test_stop_and_length(server):
    prompt = server.play("long", "one two three")
    choice = server.chat(prompt, stop=["two"])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
    choice = server.chat(prompt, max_tokens=5)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one t", "length")


def test_logprobs(server):
    answer = server.chat(server.play("probs", "hi"), logprobs=True, top_logprobs=2)
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("h", -0.5, [104])
    assert [t["token"] for t in first["top_logprobs"]] == ["h", "i"]


# ---- tools and reasoning ----

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "web_search"},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'


@pytest.mark.parametrize("interval", [1, 3, 1000])
def test_calls_come_whole_however_the_stream_is_cut(server, interval):
    prompt = server.play("call", f"Let me see. {CALL}\n{CALL}")
    events = server.stream_chat(prompt, tools=TOOLS, stream_interval=interval)
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert content(events) == "Let me see. "
    assert [c["index"] for c in calls] == [0, 1]
    assert len({c["id"] for c in calls}) == 2
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"city": "Zürich"}] * 2
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("interval", [1, 1000])
def test_who_takes_one_call_at_a_time_gets_the_first(server, interval):
    prompt = server.play("calls", f"One: {CALL} and {CALL.replace('Zürich', 'Bern')}")
    alone = {"tools": TOOLS, "parallel_tool_calls": False}
    events = server.stream_chat(prompt, **alone, stream_interval=interval)
    calls = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert [c["function"]["arguments"] for c in calls] == ['{"city": "Zürich"}']
    assert content(events) == "One:  and "
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    for more, count in (({}, 2), ({"parallel_tool_calls": True}, 2), (alone, 1)):
        message = server.chat(prompt, **{"tools": TOOLS, **more})["choices"][0]["message"]
        assert len(message["tool_calls"]) == count


def test_a_call_that_was_cut_off_is_content_and_ends_by_length(server):
    choice = server.chat(server.play("cut", CALL), tools=TOOLS, max_tokens=20)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == CALL[:20]
    assert "tool_calls" not in choice["message"]


def test_without_tools_a_call_is_text(server):
    prompt = server.play("text_call", CALL)
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert server.chat(prompt, **fields)["choices"][0]["message"]["content"] == CALL


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_held_by_a_grammar(server, choice):
    """The script is judged by the grammar: a call passes, a text does not."""
    answer = server.chat(server.play("forced", CALL), tools=TOOLS, tool_choice=choice)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    body = {
        "messages": [{"role": "user", "content": server.play("free", "no call")}],
        "tools": TOOLS,
        "tool_choice": choice,
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 500
    assert "grammar does not allow" in response.json()["error"]["message"]


def test_a_forced_call_of_a_tool_without_a_usable_schema_names_the_tools(server):
    parameters = {"type": "object", "properties": {"city": {"type": "town"}}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        "tool_choice": "required",
    }
    response = server.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith("the parameters of a tool that must be called are no schema")
    assert "town" in error["message"] and "grammar" not in error["message"].split(":")[0]


@pytest.mark.parametrize("interval", [1, 5])
def test_reasoning_is_told_apart(server, interval):
    prompt = server.play("think", "<think>\nfirst\nthis\n</think>\n\nThe answer.")
    events = server.stream_chat(prompt, stream_interval=interval, stream_options={"include_usage": True})
    assert content(events, "reasoning_content") == "first\nthis" == content(events, "reasoning")
    assert content(events) == "The answer."
    thought = len("<think>\nfirst\nthis\n</think>")
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought
    message = server.chat(prompt)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("first\nthis", "The answer.")


def test_a_schema_holds_the_answer(server):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = server.chat(server.play("fits", '{"a": 1}'), response_format=shape)
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1}
    body = {"messages": [{"role": "user", "content": server.play("unfit", '{"b": 1}')}]}
    response = server.post("/v1/chat/completions", {**body, "response_format": shape})
    assert response.status_code == 500
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_a_schema_holds_what_comes_behind_reasoning_that_the_template_opens(server):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "chat_template_kwargs": {"thinking": True},
    }
    prompt = server.play("thought", 'Is it "a"?</think>{"a": 1}')
    message = server.chat(prompt, **fields)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ('Is it "a"?', '{"a": 1}')
    unfit = {"messages": [{"role": "user", "content": server.play("worse", 'Hm.</think>{"b": 1}')}]}
    assert server.post("/v1/chat/completions", unfit | fields).status_code == 500


def test_what_is_not_known_is_named(server):
    body = {"messages": [{"role": "user", "content": "x"}], "user": "me", "new_field": 1}
    assert server.post("/v1/chat/completions", body).headers["x-kog-ignored"] == "new_field"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"temperature": 3}, "temperature"),
        ({"model": "other"}, "no model 'other' here"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs true"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs and response_format both shape",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "image_url"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool has that name"),
        ({"chat_template": "{{ 1 }}"}, "chat_template in a request is refused"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages is not allowed"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"max_tokens": 100000}, "exceeds the context"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"functions": []}, "functions is not supported"),
        ({"audio": {}}, "audio is not supported"),
        ({"guided_json": {}}, "guided_json is not supported: use structured_outputs"),
        ({"use_beam_search": True}, "use_beam_search is not supported"),
        ({"logit_bias": {"999999": 1}}, "logit_bias token id is 999999: it must be from 0 to 259"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias token id is 9999999: it must be from 0 to"),
        ({"logit_bias": {"9": 101}}, "logit_bias is 101.0: it must be from -100 to 100"),
        ({"messages": [{"role": "foo", "content": "x"}]}, "messages[0].role is 'foo': it must be"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_it(server, fields, says):
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = server.post("/v1/chat/completions", body)
    error = response.json()["error"]
    assert response.status_code == (404 if "model" in fields else 400)
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert error["type"] == ("not_found_error" if "model" in fields else "invalid_request_error")
    if says.startswith(("logit_bias", "messages[0].role")):
        assert error["param"] == next(iter(fields))


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; b=json"]
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
def test_a_body_that_does_not_say_it_is_json_is_told_how(server, path, kind):
    """curl -d says it is a form; a page of another site can send nothing else without asking first."""
    headers = {} if kind is None else {"content-type": kind}
    with server.client() as client:
        response = client.post(path, content=b"{}", headers=headers)
        said = response.json()["error"]["message"]
        assert (response.status_code, said) == (
            400,
            f"the content-type is {kind or ''!r}: send the header content-type: application/json",
        )
        json_headers = {"content-type": "Application/JSON; charset=utf-8"}
        found = client.post(path, content=b"[]", headers=json_headers)
    assert found.status_code == 400 and "content-type" not in found.text


def test_progress_tells_the_depth_and_a_cpu_has_no_share_of_a_peak(server):
    events = server.stream_chat(server.play("depth", "abcdef"), stream_interval=1)
    timings = next(e["timings"] for e in events if "timings" in e)
    prompt = timings["kv_depth"] - timings["predicted_n"] + 1
    told = [(e["progress"]["completion_tokens"], e["progress"]["kv_depth"]) for e in events]
    assert all(depth == prompt + tokens - 1 for tokens, depth in told)
    props = server.get("/props").json()
    assert timings["mbu"] is None and props["gpu"] is None
    assert props["memory_bytes"]["kv_cache"] >= timings["kv_depth"]  # now, not when it was opened


def test_a_streams_log_probabilities_are_the_answers(server):
    """Those of tokens without text, too: of the end, and of what a stop string held back."""
    prompt, fields = server.play("probs", "hi", tokens_per_s=50), {"logprobs": True}
    whole = server.chat(prompt, **fields)["choices"][0]["logprobs"]["content"]
    events = [event for event in server.stream_chat(prompt, stream_interval=1, **fields) if event["choices"]]
    told = [(event["choices"][0].get("logprobs") or {}).get("content", []) for event in events]
    assert [token for each in told for token in each] == whole


def test_a_method_that_a_path_has_not_says_which_it_has(server):
    with server.client() as client:
        response = client.delete("/v1/chat/completions")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
