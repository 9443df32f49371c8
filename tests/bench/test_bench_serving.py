"""kog bench serve and kog bench agent: tokens by usage, times by arrival, against servers that play a script."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from kog_triton.bench.cli import main
from kog_triton.bench.endpoint import read_answer
from kog_triton.errors import RunError


def event(text, tokens=None, **delta):
    made = {"choices": [{"delta": {"content": text, **delta}}]}
    return made | ({"usage": {"completion_tokens": tokens}} if tokens is not None else {})


def stream(*timed, usage=None, done=True):
    """Pieces of a stream: (time, event) each, then usage at the last time."""
    pieces = [(at, b"data: " + json.dumps(what).encode() + b"\n\n") for at, what in timed]
    end = timed[-1][0] + 0.001
    if usage is not None:
        pieces.append((end, b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"))
    return [*pieces, (end, b"data: [DONE]\n\n")] if done else pieces


USAGE = {"prompt_tokens": 7, "completion_tokens": 31, "prompt_tokens_details": {"cached_tokens": 4}}


def test_tokens_are_those_of_usage_and_not_the_events():
    """Thirty tokens behind the first in three events of ten, 10 ms apart: 1,000 a second."""
    events = [(0.5 + 0.01 * i, event("x" * 10, 1 + 10 * i)) for i in range(4)]
    answer = read_answer(stream(*events, usage=USAGE))
    assert (answer.tokens, answer.prompt_tokens, answer.cached_tokens) == (31, 7, 4)
    assert answer.ttft_s == 0.5 and answer.rate == pytest.approx(1000)
    assert answer.gaps_s == pytest.approx([0.001] * 30)


def test_a_token_an_event_needs_no_usage_in_events():
    events = [(0.1 + 0.002 * i, event("x")) for i in range(31)]
    answer = read_answer(stream(*events, usage=USAGE))
    assert answer.gaps_s == pytest.approx([0.002] * 30) and answer.rate == pytest.approx(500)


def test_times_between_tokens_are_unknown_where_nothing_tells_how_many_an_event_has():
    answer = read_answer(stream((0.1, event("x")), (0.2, event("y" * 30)), usage=USAGE))
    assert answer.gaps_s == [] and answer.rate == pytest.approx(300)


def test_pieces_may_end_anywhere_and_calls_come_in_parts():
    calls = [
        event("", 1, tool_calls=[{"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{"}}]),
        event("", 9, tool_calls=[{"index": 0, "function": {"arguments": '"é": 1}'}}]),
    ]
    whole = b": keep-alive\n\n" + b"".join(p for _, p in stream(*enumerate(calls), usage=USAGE))
    answer = read_answer([(float(i), whole[i : i + 1]) for i in range(len(whole))])
    (call,) = answer.calls
    assert call["id"] == "c1" and call["function"] == {"name": "f", "arguments": '{"é": 1}'}


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (stream((0.1, event("x")), usage=USAGE, done=False), "without \\[DONE\\]"),
        (stream((0.1, event("x"))), "told no usage"),
        (stream((0.1, {"error": {"message": "it broke"}})), "the server said: it broke"),
    ],
)
def test_what_breaks_off_is_an_error(pieces, message):
    with pytest.raises(RunError, match=message):
        read_answer(pieces)


class Scripted(BaseHTTPRequestHandler):
    """Two hundred tokens at 400 a second in events of twenty, the first alone; the request's key must be right."""

    bodies: ClassVar[list] = []

    def log_message(self, *args):
        pass

    def do_GET(self):
        self._tell(200, {"data": [{"id": "m", "max_model_len": 4096}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Scripted.bodies.append(body)
        if self.headers["authorization"] != "Bearer right":
            self._tell(401, {"error": {"message": "no valid key"}})
            return
        self.send_response(200)
        self.end_headers()
        begun = time.perf_counter()
        for i in range(11):
            time.sleep(max(0, begun + 0.05 * i - time.perf_counter()))
            self._say(event("x", 1 + 20 * i))
        self._say({"choices": [], "usage": {"completion_tokens": 201, "prompt_tokens": 70}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _say(self, what):
        self.wfile.write(b"data: " + json.dumps(what).encode() + b"\n\n")

    def _tell(self, status, what):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())


@contextmanager
def scripted():
    with ThreadingHTTPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Scripted.bodies.clear()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_serve_tells_what_clients_see(tmp_path, capsys):
    file = tmp_path / "run.json"
    with scripted() as url:
        argv = ["serve", "--url", url, "--api-key", "right", "--clients", "2", "1", "--rounds", "2"]
        assert main([*argv, "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    assert "right" not in file.read_text()
    one, two = record["rows"]
    assert (one["clients"], one["answers"], two["clients"], two["answers"]) == (1, 2, 2, 4)
    assert one["output_tokens"] == 402 and two["output_tokens"] == 804
    assert 0 < one["tokens_per_s"] <= 420 and 0 < two["tokens_per_s"] <= 420
    assert two["tokens_per_s_all"] > one["tokens_per_s_all"]
    assert one["itl_us_p50"] > 1000 and one["ttft_ms_p50"] is not None
    prompts = {body["messages"][0]["content"] for body in Scripted.bodies}
    assert len(prompts) == len(Scripted.bodies) == 7  # none finds another's beginning
    assert all(len(prompt.split()) == 64 for prompt in prompts)
    out = capsys.readouterr().out
    assert "tokens/s" in out and url in out


def test_a_wrong_key_and_a_server_that_is_not_there_are_one_line(capsys):
    with scripted() as url:
        assert main(["serve", "--url", url, "--api-key", "wrong"]) == 5
        assert "401: no valid key" in capsys.readouterr().err
    assert main(["serve", "--url", url]) == 2
    assert "nobody answers" in capsys.readouterr().err
    assert main(["agent", "--url", "ftp://x"]) == 2
    assert "no http:// or https:// address" in capsys.readouterr().err


def test_agent_reuses_what_the_slot_holds_and_hands_results_back(tmp_path, capsys):
    """Our own server: a scripted engine that calls the tool each time."""
    pytest.importorskip("fastapi")
    from tests.lib.fake_checkpoint import make_checkpoint
    from tests.lib.served import served

    checkpoint = make_checkpoint(tmp_path / "model")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 6000}))
    template = (
        "play:agent {% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function }}{% endfor %}\n{% endfor %}[assistant]"
    )
    flags = ("--chat-template", template, "--tool-call-parser", "hermes", "--max-num-seqs", "1")
    file = tmp_path / "run.json"
    with served(tmp_path / "server", checkpoint, *flags) as server:
        call = '<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>'
        server.play("agent", "I read on. " + call)
        argv = ["agent", "--url", f"{server.url}/v1", "--tokens", "1500", "--call-tokens", "200"]
        assert main([*argv, "--result-words", "40", "--json", str(file)]) == 0
        (row,) = json.loads(file.read_text())["rows"]
        assert row["tool_calls"] == row["calls"] >= 10 and row["conversations"] >= 2
        assert row["output_tokens"] >= 1500
        assert row["baseline_wall_s"] == pytest.approx(row["output_tokens"] / 100, abs=0.001)
        assert row["cached_tokens"] == server.metric("kog:cached_prompt_tokens_total")
        assert row["prompt_tokens"] == server.metric("kog:prompt_tokens_total")
        assert row["cached_tokens"] / row["prompt_tokens"] > 0.6
    assert "at 100 tokens/s" in capsys.readouterr().out
