"""What clients may not do: too much, too large, too slow, without a key; and that others do not notice."""

import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kog_triton import serve
from kog_triton.cli.foreign_flags import SERVERS, of_servers
from kog_triton.server.run import UNSENT_BYTES
from tests.lib.served import read_events, served, wait_for

SLACK_S = 2.0  # on a loaded machine, to what an idle one needs
KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, checkpoint):
    """A server with two keys, one slot and two places in line."""
    flags = ("--max-num-seqs", "1", "--max-num-queued-reqs", "2", "--api-key", *KEYS)
    with served(tmp_path_factory.mktemp("guarded"), checkpoint, *flags) as running:
        yield running


def key(i):
    return {"Authorization": f"Bearer {KEYS[i]}"}


# ---- R9: keys ----


def test_every_route_but_the_public_ones_wants_a_key(guarded, figure):
    paths = guarded.get("/openapi.json", **key(0)).json()["paths"]
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    assert len(routes) >= 14
    with guarded.client() as client:
        found = {(m, p): client.request(m, p.replace("{name}", "x")).status_code for m, p in routes}
        for path in ("/openapi.json", "/nothing", "/v1/messages/x", "/HEALTH", "/health/"):
            found["get", path] = client.get(path).status_code
        wrong = client.get("/v1/models", headers={"Authorization": "Bearer first-ke"}).status_code
        anthropic = client.get("/v1/models", headers={"x-api-key": KEYS[1]}).status_code
    public = {route for route, status in found.items() if status != 401}
    assert public == {("get", "/health"), ("get", "/ready")}  # and the page: test_playground.py
    assert (wrong, anthropic) == (401, 200)
    figure("R9", f"401 on {len(found) - len(public)} routes without a key")


# ---- R21: whose prefixes ----


def cached(server, text, *, headers=None, **fields):
    body = {"messages": [{"role": "user", "content": text}], **fields}
    answer = server.post("/v1/chat/completions", body, **(headers or {})).json()
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_prefixes_are_shared_within_a_key_and_a_salt_alone(guarded, figure):
    text = "the same long prompt " * 4
    assert cached(guarded, text, headers=key(0)) == 0
    own = cached(guarded, text, headers=key(0))
    assert own > len(text)
    assert cached(guarded, text, headers=key(1)) == 0
    assert cached(guarded, text, headers=key(1), cache_salt="s") == 0
    assert cached(guarded, text, headers=key(1), cache_salt="s") == own
    figure("R21", f"0 tokens across keys and salts, {own} within")


# ---- R8: the queue ----


def test_a_flood_is_refused_and_who_was_taken_is_served(guarded, figure):
    prompt = guarded.play("second", "x" * 20, tokens_per_s=40)
    body = {"messages": [{"role": "user", "content": prompt}]}

    def ask(_):
        begun = time.monotonic()
        response = guarded.post("/v1/chat/completions", body, **key(0))
        return response, time.monotonic() - begun

    with ThreadPoolExecutor(30) as pool:
        found = list(pool.map(ask, range(30)))
    taken = [r for r, _ in found if r.status_code == 200]
    refused = [(r, s) for r, s in found if r.status_code == 503]
    assert len(taken) + len(refused) == 30
    assert len(taken) >= 3
    assert {r.json()["choices"][0]["message"]["content"] for r in taken} == {"x" * 20}
    assert all(r.headers["retry-after"] and r.json()["error"]["code"] == "queue_full" for r, _ in refused)
    figure("R8", f"{len(refused)} of 30 refused, {len(taken)} served")


def test_the_time_in_line_is_counted_and_told(guarded):
    """One slot: whoever comes second, up to half of the first's second late, waits for the rest of it."""

    def metric(name):
        lines = guarded.get("/metrics", **key(0)).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"kog:{name} "))

    histograms = ("request_queue_time", "request_prefill_time", "request_decode_time")
    whole = (*histograms, "time_to_first_token", "e2e_request_latency")
    before = [[metric(f"{name}_seconds_{of}") for of in ("count", "sum")] for name in whole]
    prompt = guarded.play("waited", "x" * 20, tokens_per_s=20)
    body = {"messages": [{"role": "user", "content": prompt}]}

    def timings(_):
        return guarded.post("/v1/chat/completions", body, **key(0)).json()["timings"]

    with ThreadPoolExecutor(2) as pool:
        first, second = sorted(pool.map(timings, range(2)), key=lambda found: found["queue_ms"])
    after = [[metric(f"{name}_seconds_{of}") for of in ("count", "sum")] for name in whole]
    assert first["queue_ms"] < 450 < second["queue_ms"]
    for found in (first, second):
        rate = 1e3 * found["prompt_n"] / found["prompt_ms"]
        assert found["prompt_per_second"] == pytest.approx(rate, rel=0.01)
    counts = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
    queue, prefill, decode, ttft, total = (b[1] - a[1] for a, b in zip(before, after, strict=True))
    assert counts == [2] * 5
    assert queue == pytest.approx((first["queue_ms"] + second["queue_ms"]) / 1e3, abs=1e-4)
    assert prefill == pytest.approx((first["prompt_ms"] + second["prompt_ms"]) / 1e3, abs=1e-4)
    assert queue + prefill == pytest.approx(ttft) and ttft + decode == pytest.approx(total)


# ---- R5, R6: clients that leave ----


def leave(server, prompt, events):
    """Read so many events of a stream and go."""
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "stream_interval": 1}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        found = read_events(response)
        for _ in range(events):
            next(found)


def running(server):
    return server.metric("kog:num_requests_running") + server.metric("kog:num_requests_waiting")


@contextmanager
def counted(server, prompt):
    """One sample whose client leaves inside is counted as that, with the tokens that were made for nobody."""
    names = ('request_success_total{finished_reason="abort"}', "prompt_tokens_total")
    names += ("generation_tokens_total", "inter_token_latency_seconds_count")

    def figures():
        return [server.metric(f"kog:{name}") for name in names]

    before = figures()
    yield
    wait_for(lambda: figures()[0] > before[0])
    ended, told, made, gaps = (b - a for a, b in zip(before, figures(), strict=True))
    assert (ended, told) == (1, len(f"[user]{prompt}\n[assistant]")) and made == gaps + 1 > 1


def test_a_client_that_leaves_frees_its_slot(server, figure):
    prompt = server.play("endless", "x" * 400, tokens_per_s=10)
    with counted(server, prompt):
        leave(server, prompt, 2)
        seconds = wait_for(lambda: running(server) == 0)
    assert seconds < SLACK_S
    figure("R5", f"slot free {seconds * 1e3:.0f} ms after the disconnect")


def test_a_client_that_leaves_without_a_stream_frees_its_slot(server):
    prompt = server.play("endless", "x" * 400, tokens_per_s=10)
    body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
    with counted(server, prompt):
        gaps = server.metric("kog:inter_token_latency_seconds_count")
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(head(len(body)) + body)
            wait_for(lambda: server.metric("kog:inter_token_latency_seconds_count") > gaps)
    assert wait_for(lambda: running(server) == 0) < SLACK_S


def head(length, extra=b""):
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        + extra
        + b"content-length: %d\r\n\r\n" % length
    )


def memory_and_files(server):
    pid = server.process.pid
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return rss, len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_that_come_and_go_leave_nothing(server, figure, count):
    prompt = server.play("long", "x" * 300, tokens_per_s=2000)
    for i in range(20):
        leave(server, prompt, i % 7)
    wait_for(lambda: running(server) == 0)
    before = memory_and_files(server)
    for i in range(count):
        leave(server, prompt, i % 7)
    wait_for(lambda: running(server) == 0)
    wait_for(lambda: memory_and_files(server)[1] <= before[1])
    after = memory_and_files(server)
    assert after[0] < 1.05 * before[0]
    assert server.chat("x")["choices"][0]["message"]["content"] == "ok"
    figure("R6", f"{count} clients that left: {after[0] - before[0]} KiB of memory, {after[1] - before[1]} files")


# ---- R10, R12, idle connections ----


def test_idle_connections_do_no_harm_and_half_open_ones_are_closed(server, figure):
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(800)]
    half = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for raw in half:
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")
        begun = time.monotonic()
        assert server.chat("x")["choices"][0]["message"]["content"] == "ok"
        seconds = time.monotonic() - begun
        assert seconds < SLACK_S
        half[0].settimeout(30)
        assert half[0].recv(1) == b""  # closed by the server
        closed = time.monotonic() - begun
        assert 5 < closed < 20
    finally:
        for raw in idle + half:
            raw.close()
    figure(
        "R12",
        f"1,000 idle connections: an answer in {seconds * 1e3:.0f} ms, half-open ones closed after {closed:.1f} s",
    )


def unsent(server, client):
    """Bytes that the kernel holds for a client, as /proc/net/tcp tells them of the server's end."""
    ends = f"{server.port:04X}", f"{client.getsockname()[1]:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if (words[1][-4:], words[2][-4:]) == ends:
            return int(words[4].partition(":")[0], 16)
    raise AssertionError("the server has no such connection")


def test_a_reader_that_stops_is_ended_and_others_go_on(server, figure):
    """Its unread tokens are bounded; a stream beside it is whole."""
    flood = server.play("flood", "x" * 480, tokens_per_s=0)
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": flood}],
            "stream": True,
            "stream_interval": 1,
            "n": 100,
            "temperature": 1,
            "logprobs": True,
            "top_logprobs": 20,
        }
    ).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect(("127.0.0.1", server.port))
    with raw:
        raw.sendall(head(len(body)) + body)
        raw.recv(100)
        rss = memory_and_files(server)[0]
        other = server.stream_chat(server.play("other", "y" * 50, tokens_per_s=100))
        assert other[-1]["progress"]["completion_tokens"] == 51
        time.sleep(1.0)
        grown = memory_and_files(server)[0] - rss
        assert grown < 16 << 10
        assert wait_for(lambda: unsent(server, raw) > UNSENT_BYTES // 2) < 30
        kept = unsent(server, raw)
        assert kept < 2 * UNSENT_BYTES
    wait_for(lambda: running(server) == 0)
    told = f"{grown} KiB of memory, {kept >> 10} KiB in its socket"
    figure("R10", f"a reader that stops: {told}, the other stream whole")


# ---- R11: sizes ----


def raw_request(server, data, *, more=b"", parts=0):
    """The status of a request given as bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw:
        raw.sendall(data)
        try:
            for _ in range(parts):
                raw.sendall(more)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was told before it had sent all
        found = raw.recv(65536)
    return int(found.split()[1]), found


def nested(depth):
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


BODIES = {
    "no JSON": b"{",
    "no object": b"3",
    "nested": nested(100),
    "nested beyond a parser": nested(100_000),
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "huge number": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9223372036854775808}',
    "long number": b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 10_000 + b"}",
    "negative": b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    "many samples": b'{"messages": [{"role": "user", "content": "x"}], "n": 129, "temperature": 1}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "bad UTF-8": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "long prompt": b'{"messages": [{"role": "user", "content": "' + b"x" * 1_000_000 + b'"}]}',
    "long name": b'{"model": "' + b"x" * 100_000 + b'", "messages": [{"role": "user", "content": "x"}]}',
}


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body_is_refused_in_few_words(server, figure, name):
    begun = time.monotonic()
    status, answer = raw_request(server, head(len(BODIES[name])) + BODIES[name])
    seconds = time.monotonic() - begun
    assert 400 <= status < 500
    assert len(answer) < 2048 + 512
    assert seconds < SLACK_S
    figure("R11", f"{name}: {status} after {seconds * 1e3:.0f} ms")


def test_bodies_and_headers_that_are_too_large_are_refused_on_the_way(server, figure):
    megabyte = b"x" * (1 << 20)
    assert raw_request(server, head(33 << 20))[0] == 413
    chunked = head(0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    chunk = b"100000\r\n" + megabyte + b"\r\n"
    assert raw_request(server, chunked, more=chunk, parts=33)[0] == 413
    many = b"".join(b"x-%d: y\r\n" % i for i in range(300))
    assert raw_request(server, head(2, many) + b"{}")[0] == 431
    assert raw_request(server, head(2, b"x-long: " + b"y" * 70_000 + b"\r\n") + b"{}")[0] == 431
    assert raw_request(server, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")[0] == 431
    assert raw_request(server, b"nonsense\r\n\r\n")[0] == 400
    assert server.chat("x")["choices"][0]["message"]["content"] == "ok"
    figure("R11", "413 for 33 MiB, told or chunked; 431 for 300 headers and for 70 kB of them")


def test_a_nul_is_text(server):
    assert server.chat("a\0b")["choices"][0]["message"]["content"] == "ok"


# ---- R13: hostile templates ----


def test_a_hostile_template_ends_and_the_server_answers_meanwhile(tmp_path, checkpoint, figure):
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with served(tmp_path, checkpoint, "--chat-template", template) as server:
        body = {"messages": [{"role": "user", "content": "x"}]}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, "/v1/chat/completions", body)
            time.sleep(0.2)
            times = []
            while not asked.done() and len(times) < 200:
                begun = time.monotonic()
                assert server.get("/version").status_code == 200
                times.append(time.monotonic() - begun)
                time.sleep(0.02)
            response = asked.result()
        assert response.status_code == 400
        assert "template" in response.json()["error"]["message"]
    assert max(times) < SLACK_S
    figure("R13", f"a template without an end: 400; /version meanwhile in {max(times) * 1e3:.0f} ms at most")


# ---- R19: logs ----


def test_what_a_client_sends_makes_no_line_of_the_log(server, figure):
    before = server.log.read_text()
    evil = "a\nINJECTED\x1b[31m"
    with server.client() as client:
        client.get("/nothing%0aINJECTED%1b[31m")
        client.post("/v1/chat/completions", json={"model": evil, "messages": []})
        client.post("/v1/chat/completions", json={evil: 1, "messages": [{"role": "user", "content": "x"}]})
        client.get("/v1/models/a%0aINJECTED%1b[31m")
        client.get("/v1/realtime", headers={"connection": "upgrade", "upgrade": "websocket"})
    assert raw_request(server, b"nonsense\r\n\r\n")[0] == 400
    told = server.log.read_text()[len(before) :]
    assert told == ""
    names = [n for n in server.get("/metrics").text.splitlines() if "INJECTED" in n]
    assert not names
    figure("R19", "no line of the log and no label is a client's")


# ---- flags ----


def test_the_share_of_a_gpu_s_memory_reaches_the_model_and_is_a_share(capsys):
    assert serve.parse(["--gpu-memory-utilization", "0.8"]).llm["gpu_memory_utilization"] == 0.8
    assert serve.parse([]).llm["gpu_memory_utilization"] is None
    with pytest.raises(SystemExit):
        serve.parse(["--gpu-memory-utilization", "80"])
    assert "--gpu-memory-utilization: 80 is not above 0 and at most 1" in capsys.readouterr().err


# ---- flags of others ----


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--quantization=fp8", "there is no --quantization: leave it out: a checkpoint says how it is quantized"),
        ("--enforce-eager", "there is no --enforce-eager: leave it out: no CUDA graph is captured"),
        ("--swap-space=4", "there is no --swap-space: leave it out: nothing is swapped"),
        ("--max-num-batched-tokens=9", "there is no --max-num-batched-tokens: leave it out: prompts run in chunks"),
        ("--disable-log-requests", "there is no --disable-log-requests: leave it out: requests are not logged"),
        ("--enable-prompt-tokens-details", "there is no --enable-prompt-tokens-details: leave it out: usage always"),
        ("--root-path=/x", "there is no --root-path: put a proxy in front of the server"),
        ("--pipeline-parallel-size=2", "--pipeline-parallel-size is --tensor-parallel-size N here"),
        ("-ngl", "there is no -ngl: leave it out: a model is in a GPU whole"),
        ("-c", "-c is --max-model-len N here"),
        ("--parallel", "--parallel is --max-num-seqs N here"),
        ("--num-slots", "--num-slots is --max-num-seqs N here"),
        ("--never-heard-of", "unrecognized arguments: --never-heard-of"),
    ],
)  # fmt: skip
def test_flags_of_other_servers_are_said_by_name(flag, said, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.main([flag])
    assert ended.value.code == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_what_other_servers_flags_lead_to_is_ours():
    own = {flag for action in serve.build_parser()._actions for flag in action.option_strings}
    table = of_servers(own)
    assert len(table) > 60 and not own & table.keys() and not own & SERVERS.keys()
    for instead in table.values():
        assert not instead.startswith("-") or instead.split()[0].rstrip(",") in own
