"""OpenAI's client for Node gives what the one for Python gives, case by case."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import openai
import pytest

from tests.lib.served import wait_for

HERE = Path(__file__).parent / "node"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
UNSTREAMED = {("chat", "cut"), ("chat", "fails")}  # both clients raise an error of their own for them
FLAT_TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A folder with the client and what package-lock.json names."""
    if shutil.which("npm") is None:
        pytest.skip("needs node and npm: install them")
    folder = tmp_path_factory.mktemp("node")
    for name in ("client.mjs", "package.json", "package-lock.json"):
        shutil.copy(HERE / name, folder)
    subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True, timeout=300, env=os.environ
    )
    return folder


def cases(server):
    def says(name, text, **script):
        return [{"role": "user", "content": server.play(f"node_{name}", text, **script)}]

    chats = {
        "plain": {"messages": says("plain", "Grüße 🙂")},
        "fast": {"messages": says("fast", "word " * 60, tokens_per_s=3000)},
        "cut": {"messages": says("cut", "abcdef"), "max_completion_tokens": 3},
        "stop": {"messages": says("stop", "one two"), "stop": " "},
        "samples": {"messages": says("samples", "ab"), "n": 3, "temperature": 1},
        "calls": {"messages": says("calls", f"See. {CALL}{CALL}"), "tools": TOOLS},
        "forced": {"messages": says("forced", CALL), "tools": TOOLS, "tool_choice": "required"},
        "thinks": {"messages": says("thinks", "<think>hm</think>Yes.")},
        "json": {"messages": says("json", '{"a": 1}'), "response_format": {"type": "json_object"}},
        "wrong": {"messages": says("wrong", "x"), "temperature": 9},
        "other": {"messages": says("other", "x"), "model": "other"},
        "fails": {"messages": says("fails", "abc", faults={"0": "nan"})},
    }
    texts = {
        "one": {"prompt": says("one", "text")[0]["content"], "max_tokens": 40},
        "two": {"prompt": [says(n, n)[0]["content"] for n in ("uno", "due")], "max_tokens": 40, "logprobs": 1},
        "ids": {"prompt": [1, 2, 3], "max_tokens": 5},
    }
    inputs = {
        "plain": {"input": says("r_plain", "Hello."), "instructions": "Be."},
        "cut": {"input": says("r_cut", "abcdef"), "max_output_tokens": 3},
        "calls": {"input": says("r_calls", f"<think>a</think>b{CALL}"), "tools": FLAT_TOOLS},
    }
    for kind, bodies in (("chat", chats), ("completions", texts), ("responses", inputs)):
        for name, body in bodies.items():
            yield {"kind": kind, "body": {"model": "", **body}}
            if (kind, name) not in UNSTREAMED:
                yield {"kind": f"{kind}_stream", "body": {"model": "", **body}}


def by_python(client, kind, body):
    api = kind.removesuffix("_stream")
    if kind == "completions_stream":
        texts = {}
        for part in client.completions.create(**body, stream=True):
            for choice in part.choices:
                texts[str(choice.index)] = texts.get(str(choice.index), "") + choice.text
        return texts
    if api == "completions":
        answer = client.completions.create(**body)
        choices = [[c.text, c.finish_reason, c.logprobs.tokens if c.logprobs else None] for c in answer.choices]
        return {"choices": choices, "made": answer.usage.completion_tokens}
    if api == "chat":
        if kind == "chat":
            answer = client.chat.completions.create(**body)
        else:
            with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
                answer = stream.until_done().get_final_completion()
        choices = [
            {
                "content": c.message.content,
                "calls": [[t.function.name, t.function.arguments] for t in c.message.tool_calls or []],
                "finish": c.finish_reason,
            }
            for c in answer.choices
        ]
        return {"choices": choices, "made": answer.usage.completion_tokens}
    if kind == "responses":
        answer = client.responses.create(**body)
    else:
        events = list(client.responses.create(**body, stream=True))
        answer = events[-1].response
    return {
        "status": answer.status,
        "text": answer.output_text,
        "items": [item.type for item in answer.output],
        "made": answer.usage.output_tokens,
    }


def test_both_clients_get_the_same(server, node, figure):
    given = list(cases(server))
    asked = json.dumps({"url": server.url, "cases": given})
    done = subprocess.run(["node", "client.mjs"], cwd=node, input=asked, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    assert len(theirs) == len(given) >= 30
    failed = 0
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for case, found in zip(given, theirs, strict=True):
            try:
                own = by_python(client, **case)
            except openai.APIStatusError as error:
                own = {"status": error.status_code, "code": error.code}
                failed += 1
            assert found == own, case
    assert failed == 5
    figure("A10", f"{len(given)} cases: openai for Python and for Node agree")


def test_nodes_abort_frees_the_slot(server, node):
    prompt = server.play("node_endless", "x" * 400, tokens_per_s=20)
    body = {"model": "", "messages": [{"role": "user", "content": prompt}]}
    asked = json.dumps({"url": server.url, "cases": [{"kind": "abort", "body": body}]})
    done = subprocess.run(["node", "client.mjs"], cwd=node, input=asked, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == ["left"]
    wait_for(lambda: server.metric("kog:num_requests_running") == 0)
