"""R15: grammars that are wrong, too large or too deep are the client's error, in one line and alone."""

import json
import threading
import time

import pytest

from tests.lib.served import content, read_events, wait_for

SLACK_S = 2.0  # on a loaded machine, to what an idle one needs
CHAIN = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(20_000)}
# what is asked for, what the model says, whether that is a 200 or a 400, and a word of the error
HOSTILE = {
    "nested quantifiers": ({"regex": "((a{1,1000}){1,1000}){1,1000}"}, "a" * 60, "too complex"),
    "quantifiers of quantifiers": ({"regex": "((a+)+)+b"}, "a" * 50 + "b", None),
    "100,000 alternatives": ({"regex": "|".join(f"a{i}" for i in range(100_000))}, "a1", None),
    "1,000,000 alternatives": (
        {"regex": "|".join(f"a{i}" for i in range(1_000_000))},
        "a1",
        "too big|took more than|memory|ended its process",
    ),
    "100,000 choices": ({"choice": [f"v{i}" for i in range(100_000)]}, "v1", "took more than"),
    "open group": ({"regex": "(" * 10_000}, "", "regex"),
    "look-around": ({"regex": "(?=a)b"}, "", "look-around"),
    "reference to itself": ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "", "json"),
    "20,000 references in a row": (
        {"json": {"$ref": "#/$defs/a0", "$defs": CHAIN | {"a20000": {"type": "string"}}}},
        "",
        "ended its process",
    ),
    "30 levels of ten references": (
        {
            "json": {
                "$ref": "#/$defs/a0",
                "$defs": {"a30": {"type": "string"}}
                | {f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}] * 10} for i in range(30)},
            }
        },
        "[[[[",
        None,
    ),
    "50 levels": ({"json": json.loads('{"items":' * 50 + "{}" + "}" * 50)}, "[[[[", None),
    "20,000 properties": (
        {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}},
        "",
        "too large",
    ),
    "left recursion": ({"grammar": "start: start start | start"}, "", "grammar"),
    "200,000 empty lines": ({"grammar": "\n" * 200_000 + 'start: "a"'}, "a", None),
    "a long GBNF": ({"grammar": 'root ::= "a"\n' * 20_000}, "", "GBNF"),
    "no rule": ({"grammar": "x: y"}, "", "grammar"),
    "5,000 parentheses": ({"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "", "nested"),
    "doubled 64 times": (
        {"grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(64)) + '\na64: "a"'},
        "aaaa",
        "Too many items",
    ),
    "an intersection": ({"grammar": "start: A\nA: /(.*a.{300})/ & /(.*b.{300})/ & ~/(.*c.{300})/"}, "", "fuel"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_harmless(server, figure, name):
    """While a stream runs beside it: that stream is whole, the engine lives, the next grammar is good."""
    shape, says, refused = HOSTILE[name]
    restarts = server.metric("kog:engine_restarts_total")
    prompt = server.play("beside", "y" * 100, tokens_per_s=100)
    gaps = []

    def read():
        body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "stream_interval": 1}
        with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as r:
            last = time.monotonic()
            for _ in read_events(r):
                now = time.monotonic()
                gaps.append(now - last)
                last = now

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: len(gaps) > 3)
    body = {
        "messages": [{"role": "user", "content": server.play("hostile", says)}],
        "structured_outputs": shape,
        "max_tokens": len(says) or 2,
    }
    begun = time.monotonic()
    response = server.post("/v1/chat/completions", body)
    seconds = time.monotonic() - begun
    reader.join()
    assert len(gaps) >= 100
    if refused is None:
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["message"]["content"] == says
    else:
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (400, "invalid_request_error")
        assert any(word in error["message"] for word in refused.split("|")), error
        assert error["message"].startswith("structured_outputs")
        assert "\n" not in error["message"]
        assert len(error["message"]) < 400
    assert seconds < 5 + SLACK_S
    good = server.chat("x", structured_outputs={"regex": "o+k"})
    assert good["choices"][0]["message"]["content"] == "ok"
    assert server.metric("kog:engine_restarts_total") == restarts
    figure(
        "R15", f"{name}: {response.status_code} after {seconds:.2f} s, longest gap beside it {max(gaps) * 1e3:.0f} ms"
    )


def test_a_grammar_that_grows_too_complex_ends_its_stream_with_the_clients_error(server):
    shape, says, _ = HOSTILE["nested quantifiers"]
    prompt = server.play("hostile", says, tokens_per_s=1000)
    body = {"messages": [{"role": "user", "content": prompt}], "structured_outputs": shape}
    with (
        server.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response,
    ):
        events = list(read_events(response))
    assert content(events[:-1]).startswith("aaaa")
    assert events[-1]["error"]["type"] == "invalid_request_error"
    assert "too complex" in events[-1]["error"]["message"]


def test_a_tools_schema_is_tried_too(server):
    schema = {"$ref": "#/$defs/a0", "$defs": CHAIN | {"a20000": {"type": "string"}}}
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": "required",
    }
    response = server.post("/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
