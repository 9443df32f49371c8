"""What would change an answer and is not there is refused by name, whichever endpoint is asked; what is not known at
all is named in a header, also inside other objects."""

import pytest
from pydantic import ValidationError

from kog_triton.demo import checkpoint_path
from kog_triton.outputs import Logprob
from kog_triton.server import figures
from kog_triton.server.problems import Problem
from kog_triton.server.schemas.chat import ChatBody
from kog_triton.server.schemas.messages import MessagesBody
from kog_triton.server.schemas.responses import ResponsesBody
from kog_triton.text import Tokenizer

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object"}


def chat(**fields):
    return ChatBody.model_validate({"messages": MESSAGES} | fields)


def messages(**fields):
    return MessagesBody.model_validate({"messages": MESSAGES, "max_tokens": 4} | fields)


def responses(**fields):
    return ResponsesBody.model_validate({"input": "x"} | fields)


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"type": "json_schema"}, "response_format.json_schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "json_schema.schema is missing"),
        ({"type": "json_schema", "json_schema": SCHEMA}, "Extra inputs are not permitted"),
        ({"type": "json_object", "schema": SCHEMA}, "Extra inputs are not permitted"),
    ],
)
def test_a_schema_that_lies_elsewhere_is_no_free_choice(shape, says):
    with pytest.raises((Problem, ValidationError), match=says):
        chat(response_format=shape).given()


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"type": "json_schema", "name": "x"}, "text.format.schema is missing"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "Extra inputs"),
    ],
)
def test_nor_is_one_of_responses(form, says):
    with pytest.raises((Problem, ValidationError), match=says):
        responses(text={"format": form}).chat()


@pytest.mark.parametrize("body", [messages, responses])
@pytest.mark.parametrize("name", ["response_format", "structured_outputs", "guided_json", "stop", "logit_bias"])
def test_other_endpoints_fields_that_shape_an_answer_are_refused(body, name):
    with pytest.raises(Problem, match=f"{name} is not supported"):
        body(**{name: {"a": 1}})


def test_responses_need_no_store():
    with pytest.raises(Problem, match="prompt needs a store"):
        responses(prompt={"id": "x"}).chat()


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_messages_have_answers_of_a_shape(where):
    form = {"type": "json_schema", "schema": SCHEMA}
    body = messages(**{where: {"format": form} if where == "output_config" else form})
    assert body.chat().given()["structured_outputs"].json == '{"type": "object"}'
    with pytest.raises(Problem, match=r"output_config\.format must be of type json_schema"):
        messages(output_config={"format": {"type": "yaml"}}).chat()
    assert "structured_outputs" not in messages(output_config={"effort": "high"}).chat().given()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tool_choice": {"type": "banana"}}, "tool_choice.type is banana"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\] has no input_schema"),
        ({"thinking": {"type": "banana"}}, "thinking.type is banana"),
    ],
)
def test_messages_drop_no_choice(fields, says):
    with pytest.raises(Problem, match=says):
        messages(**fields).chat()


def test_messages_leave_out_what_others_run_and_pass_a_choice_on():
    assert messages(tools=[{"type": "web_search_20250305", "name": "w"}]).chat().tools is None
    assert messages(tool_choice={"type": "any"}).chat().tool_choice == "required"


def test_fields_that_nobody_reads_are_named_by_their_place():
    body = chat(stream_options={"includeusage": True, "include_usage": True}, banana=1)
    assert body.ignored == ["banana", "stream_options.includeusage"]
    asked = responses(reasoning={"bogus": 1}, max_tool_calls=2, stream_options={"x": 1})
    assert asked.ignored == ["max_tool_calls", "reasoning.bogus", "stream_options.x"]


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [("chat/completions", {"messages": MESSAGES}, "web_search"), ("responses", {"input": "x"}, "web_search"),
     ("messages", {"messages": MESSAGES, "max_tokens": 4}, "web_search_20250305")],
)  # fmt: skip
def test_tools_that_nobody_runs_are_named_and_not_told_as_active(server, path, body, kind):
    own = {"name": "f", "input_schema": SCHEMA}
    if path != "messages":
        own = {"type": "function", "name": "f", "function": {"name": "f"}}
    for tools in ([own, {"type": kind, "name": "w"}], [{"type": kind, "name": "w"}]):
        response = server.post(f"/v1/{path}", body | {"tools": tools})
        assert response.headers["x-kog-ignored"] == f"tools[{len(tools) - 1}]: {kind}"
        assert response.json().get("tools", tools[:-1]) == tools[:-1]
    assert "x-kog-ignored" not in server.post(f"/v1/{path}", body | {"tools": [own]}).headers


# ---- log-probabilities of a completion ----


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(checkpoint_path())


def test_a_token_begins_where_the_text_of_those_before_it_ends(tokenizer):
    """A character of several tokens begins with the first of them; what a text skips has none."""
    text = "aé😀漢 x"
    ids = tokenizer.encode(text)
    plain = [t for t in ids if tokenizer.decode([t], skip_special_tokens=True)]
    assert len(plain) > len(text) and set(ids) - set(plain) == {ids[0]}
    offsets, at, before = figures.Offsets(tokenizer, True, 5), [], b""
    for token in ids:
        at.append(offsets.next(token))
        assert at[-1] == 5 + len(before.decode(errors="ignore"))
        if token in plain:
            before += tokenizer.token_bytes(token)
    assert before.decode() == text and offsets.end == 5 + len(text)


def test_a_part_of_a_character_is_named_by_its_bytes(tokenizer):
    parts = [t for t in tokenizer.encode("😀") if tokenizer.decode([t], skip_special_tokens=True)]
    names = [figures.token_name(tokenizer, t, "\ufffd") for t in parts]
    assert names == [r"bytes:\xf0\x9f", r"bytes:\x98", r"bytes:\x80"]
    assert figures.token_name(tokenizer, parts[0], "a") == "a"


def test_a_token_keeps_its_own_figure_where_another_has_its_name():
    candidates = {3: Logprob(-2.0, 2, "x"), 4: Logprob(-1.0, 1, "x")}
    found = figures.completion_logprobs([candidates], ["x"], [0], lambda _, text: text)
    assert found["top_logprobs"] == [{"x": -2.0}]


def test_what_responses_cannot_include_is_refused():
    known = ["reasoning.encrypted_content", "web_search_call.results"]
    assert responses(include=known).chat().messages
    with pytest.raises(ValidationError, match=r"reasoning\.encrypted_content"):
        responses(include=["reasoning.summary"])
    with pytest.raises(Problem, match="log-probabilities"):
        responses(include=["message.output_text.logprobs"]).chat()
