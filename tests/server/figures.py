"""The server's own figures on a scripted engine: `python -m tests.server.figures`, printed and kept in record.json.

Three processes share the machine: engine, server and this client. Times are of one clock: the engine's stamp of a
token to its arrival here, so that the hop to the socket is less than what is told.
"""

import argparse
import json
import os
import platform
import socket
import tempfile
import threading
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from kog_triton.metrics import percentile
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.served import Served, content, served

RATE = 3000  # tokens/s of the scripted engine
TOKENS = 6000
RECORD = Path(__file__).with_name("record.json")


def roomy(folder):
    make_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 16}))
    return folder


def raw_stream(server: Served, body, path="/v1/chat/completions"):
    """[(arrival in ns, event)] of a stream, read as it comes and parsed afterwards."""
    data = json.dumps(body | {"stream": True}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    pieces = []
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = time.perf_counter_ns()
        raw.sendall(head.encode() + data)
        while piece := raw.recv(1 << 16):
            pieces.append((time.perf_counter_ns(), piece))
    whole, events, at = b"".join(piece for _, piece in pieces), [], 0
    ends, total = [], 0
    for arrived, piece in pieces:
        total += len(piece)
        ends.append((total, arrived))
    i = 0
    while (at := whole.find(b"data: {", at)) >= 0:
        end = whole.index(b"\n\n", at)
        while ends[i][0] < end:
            i += 1
        events.append((ends[i][1], json.loads(whole[at + 6 : end])))
        at = end
    return sent, events


def ask(prompt, **fields):
    return {"messages": [{"role": "user", "content": prompt}], **fields}


def quantiles(values):
    return {f"p{q}": round(percentile(values, q), 1) for q in (50, 90, 99)} | {
        "max": round(max(values), 1)
    }


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


def memory_kib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(server, seconds=10):
    pids = server.process.pid, server.engine_pid()
    time.sleep(2)
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(seconds)
    return [100 * (cpu_seconds(pid) - b) / seconds for pid, b in zip(pids, before, strict=True)]


def soak(server, seconds):
    """MiB a minute that both processes grow in the second half, requests, and errors."""
    prompt = server.play("soak", "x" * 200, tokens_per_s=RATE)
    pids = server.process.pid, server.engine_pid()
    begun, requests, errors, points = time.monotonic(), 0, 0, []
    while (now := time.monotonic()) - begun < seconds:
        body = ask(f"{requests} {prompt}", stream=False)
        response = server.post("/v1/chat/completions", body)
        errors += response.status_code != 200
        errors += content(server.stream_chat(f"{requests} {prompt}")) != "x" * 200
        requests += 2
        if now - begun > seconds / 2:
            points.append((now, sum(memory_kib(pid) for pid in pids)))
    mean_t = sum(t for t, _ in points) / len(points)
    mean_m = sum(m for _, m in points) / len(points)
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    slope = sum((t - mean_t) * (m - mean_m) for t, m in points) / spread
    return {"mib_per_minute": round(slope * 60 / 1024, 3), "requests": requests, "errors": errors}


def cost(server, tokens, **fields):
    """us of the server's processor time a token."""
    prompt = server.play("cost", "x" * tokens, tokens_per_s=RATE)
    before = cpu_seconds(server.process.pid)
    raw_stream(server, ask(prompt, **fields))
    return round(1e6 * (cpu_seconds(server.process.pid) - before) / tokens, 1)


def measure(args):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        checkpoint = roomy(folder / "model")
        with served(folder / "server", checkpoint, "--max-num-seqs", "8") as server:
            hop(server, 500)  # warm
            gaps, first, tokens = coalesced(server, args.tokens)
            found = {
                "engine_to_client_us": quantiles(hop(server, args.tokens)),
                "coalesced_gap_ms": quantiles(gaps),
                "coalesced_first_token_ms": round(first, 3),
                "coalesced_tokens_an_event": round(tokens, 1),
                "server_us_a_token": {
                    "an event a token": cost(server, args.tokens, stream_interval=1),
                    "an event in 10 ms": cost(server, args.tokens),
                },
                "first_byte_ms_of_512_tokens": quantiles(first_byte(server, 512, 50)),
                "streams_tokens_per_s": {
                    n: [round(r, 1) for r in streams(server, n, 600)] for n in (1, 2, 4, 8)
                },
                "idle_percent_of_a_core": [round(share, 2) for share in idle(server)],
                "soak": soak(server, args.soak) | {"seconds": args.soak},
            }
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.server.figures")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--soak", type=float, default=300.0, metavar="S")
    parser.add_argument("--keep", action="store_true", help=f"write {RECORD.name}")
    args = parser.parse_args()
    record = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "tokens_per_s": RATE,
        "figures": measure(args),
    }
    print(json.dumps(record, indent=2))
    if args.keep:
        RECORD.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
