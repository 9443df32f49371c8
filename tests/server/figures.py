"""The server's own figures on a scripted engine: `python -m tests.server.figures`, printed beside what is asked of
them; --keep writes record.json.xz. Through a GPU's socket: through_socket.py; other clients: real_clients.py;
R17, a soak: soak.py.

Three processes share the machine: engine, server and this client. Times are of one clock: the engine's stamp of a
token to its arrival here, so that the hop to the socket is less than what is told. The cores are those that this
process may use: `taskset -c 0,1 python -m tests.server.figures` is a machine of two on a larger one, and the record
names them. What the fuzz finds is no figure of time and has a record of its own (fuzzing.py).
"""

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from kog_triton.bench import machine
from kog_triton.metrics import percentile
from tests.lib import kept_rows
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.raw_stream import raw_stream, request_head
from tests.lib.served import content, served
from tests.server.asked import Asked, by_name
from tests.server.reparsing import follow
from tests.server.soak import memory_kib
from tests.server.ten_questions import agents, converse, percent_cached

RATE = 3000  # tokens/s of the scripted engine
TOKENS = 6000
FREE_S = 0.005  # for the slot of a client that left to be free; what is asked is a step, or 50 ms
RECORD = Path(__file__).with_name("record.json.xz")


def ask(prompt, **fields):
    return {"messages": [{"role": "user", "content": prompt}], **fields}


def quantiles(values):
    return {f"p{q}": round(percentile(values, q), 1) for q in (50, 90, 99)} | {"max": round(max(values), 1)}


def hop(server, tokens):
    """us from the engine's stamp of a token to its event here, an event a token."""
    prompt = server.play("hop", "x" * tokens, tokens_per_s=RATE, stamps="stamps")
    _, events = raw_stream(server, ask(prompt, stream_interval=1))
    stamps = json.loads((server.scripts / "stamps").read_text())
    told = [(at, e) for at, e in events if e["choices"] and e["choices"][0]["delta"].get("content")]
    return [(at - stamps[e["progress"]["completion_tokens"] - 1]) / 1e3 for at, e in told]


def coalesced(server, tokens):
    """ms between events, ms of the first token's event after its stamp, tokens an event."""
    prompt = server.play("flow", "x" * tokens, tokens_per_s=RATE, stamps="stamps")
    _, events = raw_stream(server, ask(prompt))
    stamps = json.loads((server.scripts / "stamps").read_text())
    told = [at for at, e in events if e["choices"] and e["choices"][0]["delta"].get("content")]
    gaps = [(b - a) / 1e6 for a, b in pairwise(told)]
    return gaps, (told[0] - stamps[0]) / 1e6, tokens / len(told)


def first_byte(server, prompt_tokens, count):
    """ms from the request to the first event, without the engine's own time, which begins as it takes the prompt."""
    found = []
    for i in range(count):
        text = f"{i}" + "y" * (prompt_tokens - 40)
        prompt = text + server.play("first", "z", stamps="stamps")
        sent, events = raw_stream(server, ask(prompt))
        found.append((events[0][0] - sent) / 1e6)
    return found


def streams(server, count, tokens):
    """tokens/s of each of several streams at once, each asked for at the rate's share."""
    prompt = server.play("shared", "x" * tokens, tokens_per_s=RATE / count)
    rates = []

    def one():
        events = server.stream_chat(prompt)
        assert content(events) == "x" * tokens
        rates.append(events[-1]["timings"]["predicted_per_second"])

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rates


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(server, seconds=10):
    pids = server.process.pid, server.engine_pid()
    time.sleep(2)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(seconds)
    return [100 * (cpu_seconds(pid) - b) / seconds for pid, b in zip(pids, before, strict=True)]


def gaps_us(server, tokens):
    """us between the events of a stream with an event a token."""
    prompt = server.play("alone", "x" * tokens, tokens_per_s=RATE)
    _, events = raw_stream(server, ask(prompt, stream_interval=1))
    return [(b - a) / 1e3 for (a, _), (b, _) in pairwise(events)]


@contextmanager
def slow_reader(server):
    """A client that reads a byte a second of a stream at RATE, until it is ended."""
    prompt = server.play("unread", "x" * 60000, tokens_per_s=RATE)
    data = json.dumps(ask(prompt, stream_interval=1, stream=True)).encode()
    stop = threading.Event()
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        raw.sendall(request_head(len(data), "/v1/chat/completions") + data)

        def read():
            while not stop.wait(1.0) and raw.recv(1):
                pass

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            stop.set()
            reader.join()


def beside_a_slow_reader(server, tokens):
    """p99 in us between the tokens of a stream, alone and beside a client that does not read, whose MiB too."""
    pid = server.process.pid
    alone, before = percentile(gaps_us(server, tokens), 99), memory_kib(pid)
    with slow_reader(server):
        time.sleep(1.0)
        beside = percentile(gaps_us(server, tokens), 99)
        grown = (memory_kib(pid) - before) / 1024
    return {"alone": round(alone, 1), "beside": round(beside, 1), "mib": round(grown, 2)}


def answers_ms(server, count):
    found = []
    for i in range(count):
        begun = time.perf_counter()
        server.chat(f"{i}")
        found.append(1e3 * (time.perf_counter() - begun))
    return percentile(found, 99)


def beside_half_open(server, count):
    """p99 in ms of short answers, alone and beside 200 requests whose head never ends."""
    alone = answers_ms(server, count)
    half = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for raw in half:
            raw.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost:")
        return {"alone": round(alone, 2), "beside": round(answers_ms(server, count), 2)}
    finally:
        for raw in half:
            raw.close()


def after_a_leaver_ms(server, count):
    """Median ms to a first event: idle, right after a client that left in the middle of its stream, and when that
    client's slot may be free at the latest.

    A slot has a step to be free, and a request joins between two: 0.33 ms here, a fifth of what it waits for all."""
    prompt = server.play("left", "x" * 400, tokens_per_s=RATE)
    found = {"idle": [], "at once": [], "after": []}
    for i in range(count):
        for when, times in found.items():
            if when != "idle":
                with (
                    server.client() as http,
                    http.stream("POST", "/v1/chat/completions", json=ask(f"{i} {prompt}", stream=True)) as response,
                ):
                    next(response.iter_lines())
            if when != "at once":
                time.sleep(FREE_S)
            sent, events = raw_stream(server, ask(f"{i} {server.play('first', 'z')}"))
            times.append((events[0][0] - sent) / 1e6)
    return {when: round(percentile(times, 50), 3) for when, times in found.items()}


def parsed_again(server, tokens):
    """s from the request until a client that parses everything again at each event has parsed the last one."""
    prompt = server.play("parsed", "word " * (tokens // 5), tokens_per_s=RATE)
    found = {}
    for name, fields in (("10 ms", {}), ("a token", {"stream_interval": 1})):
        client, seconds = follow(server, ask(prompt, **fields))
        assert client.text == "word " * (tokens // 5)
        found[f"an event in {name}"] = {"events": client.events, "seconds": round(seconds, 2)}
    return found


def cost(server, tokens, **fields):
    """us of the server's processor time a token."""
    prompt = server.play("cost", "x" * tokens, tokens_per_s=RATE)
    before = cpu_seconds(server.process.pid)
    raw_stream(server, ask(prompt, **fields))
    return round(1e6 * (cpu_seconds(server.process.pid) - before) / tokens, 1)


def measure(tokens: int) -> Iterator[tuple[str, Any]]:
    """(name, figure), each as it is found."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        flags = ["--max-num-seqs", "8", "--tool-call-parser", "hermes"]
        flags += ["--reasoning-parser", "think"]
        model = make_checkpoint(folder / "model", max_context=1 << 16)
        with served(folder / "server", model, *flags) as server:
            hop(server, 500)  # warm
            yield "engine_to_client_us", quantiles(hop(server, tokens))
            gaps, first, tokens_an_event = coalesced(server, tokens)
            yield "coalesced_gap_ms", quantiles(gaps)
            yield "coalesced_first_token_ms", round(first, 3)
            yield "coalesced_tokens_an_event", round(tokens_an_event, 1)
            yield (
                "server_us_a_token",
                {
                    "an event a token": cost(server, tokens, stream_interval=1),
                    "an event in 10 ms": cost(server, tokens),
                },
            )
            yield "first_byte_ms_of_512_tokens", quantiles(first_byte(server, 512, 50))
            shared = {n: [round(r, 1) for r in streams(server, n, 600)] for n in (1, 2, 4, 8)}
            yield "streams_tokens_per_s", shared
            yield "parsed_again_at_each_event", parsed_again(server, 3000)
            yield "p99_us_beside_a_slow_reader", beside_a_slow_reader(server, tokens)
            yield "p99_ms_beside_200_half_open", beside_half_open(server, 100)
            yield "first_event_ms_after_a_leaver", after_a_leaver_ms(server, 50)
            yield "idle_percent_of_a_core", [round(share, 2) for share in idle(server)]
        with agents(folder / "agents") as server:
            questions = converse(server)
            assert all(question.warm == question.cold for question in questions)
            yield "ten_questions_percent_cached", round(percent_cached(questions), 1)


def asked(found):
    hop_us = found["engine_to_client_us"]
    reader, half = found["p99_us_beside_a_slow_reader"], found["p99_ms_beside_200_half_open"]
    left, rates = found["first_event_ms_after_a_leaver"], found["streams_tokens_per_s"]
    most = [
        ("engine to client, p50 us", hop_us["p50"], 100),
        ("engine to client, p99 us", hop_us["p99"], 500),
        ("between coalesced events, p99 ms", found["coalesced_gap_ms"]["p99"], 17),
        ("first token behind its stamp, coalesced, ms", found["coalesced_first_token_ms"], 1),
        ("first byte of 512 tokens, p99 ms", found["first_byte_ms_of_512_tokens"]["p99"], 5),
        ("idle, percent of a core", sum(found["idle_percent_of_a_core"]), 2),
        ("R5: first event after a leaver by idle", left["after"] / left["idle"], 1.1),
        ("R10: p99 beside a slow reader by alone", reader["beside"] / reader["alone"], 1.1),
        ("R10: MiB of a slow reader", reader["mib"], 1),
        ("R12: p99 beside half-open ones by alone", half["beside"] / half["alone"], 1.2),
        ("A26: fastest by slowest stream", max(max(r) / min(r) for r in rates.values()), 1.1),
    ]
    cached = found["ten_questions_percent_cached"]
    return [
        *(Asked(what, round(value, 3), limit) for what, value, limit in most),
        Asked("ten questions, percent cached, at least", cached, 95, at_least=True),
    ]


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.server.figures")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--keep", action="store_true", help=f"write {RECORD.name}")
    args = parser.parse_args()
    record: dict[str, Any] = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "kernel": platform.release(),
        "cores": sorted(os.sched_getaffinity(0)),
        "cores_of_the_machine": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "tokens_per_s": RATE,
        "figures": {},
    }
    for name, found in measure(args.tokens):
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        record["figures"][name] = found
    record["asked"] = by_name(asked(record["figures"]))
    print(json.dumps(record, indent=2))
    print(*asked(record["figures"]), sep="\n")
    if args.keep:
        kept_rows.write(RECORD, record)


if __name__ == "__main__":
    main()
