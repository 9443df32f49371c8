"""R17: a server under everything that clients do, for a while: errors, memory and the pace of tokens over the time.

`python -m tests.server.soak` takes five minutes behind a warm-up of WARM_UP requests, about nine in all, and prints
what it found beside what is asked; --keep writes soak-record.json.xz. Its cores are those that this process may use, as
in figures.py. A test of tests/server/ takes some seconds.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kog_triton.bench import machine
from tests.lib import kept_rows
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.served import Served, content, read_events, served
from tests.server.asked import Asked, by_name

RECORD = Path(__file__).with_name("soak-record.json.xz")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SOAK_S = 300.0
WORDS = 10_000  # of tokenizers' cache
WARM_UP = 3000  # requests: memory grew by 18 MiB in the first 3,200 of 5,400 and by 1.6 in the others
RATE = 3000  # tokens/s of the scripted engine
TEXT = "one two three. " * 13
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def memory_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


class Soak:
    """`one` does the next kind of request. Errors are answers that are not what was played, or not the status."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._text = server.play("soak", TEXT, tokens_per_s=RATE)
        self._call = server.play("soak_call", CALL)
        self._json = server.play("soak_json", '{"a": 1}')
        self._thought = server.play("soak_thought", "<think>hm</think>Yes.")
        self.requests, self.errors = Counter[str](), Counter[str]()
        self.paces: list[tuple[float, float]] = []  # when, and p99 between the tokens of a stream in us
        self._kinds: list[Callable[[str], bool]] = [
            *(self.stream, self.chat, self.completion, self.call, self.grammar, self.response),
            *(self.message, self.leave, self.wrong, self.hostile, self.conversation, self.count),
        ]

    def one(self) -> None:
        number = self.requests.total()
        kind = self._kinds[number % len(self._kinds)]
        self.requests[kind.__name__] += 1
        try:
            good = kind(f"{number} ")
        except Exception as error:
            good = False
            print(f"{kind.__name__}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        self.errors[kind.__name__] += not good

    def _post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        response = self._server.post(path, body)
        assert response.status_code == status, (response.status_code, response.text[:200])
        return dict(response.json())

    def _chat(self, prompt: str, status: int = 200, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return self._post("/v1/chat/completions", status, messages=messages, **fields)

    # ---- kinds ----

    def stream(self, name: str) -> bool:
        events = self._server.stream_chat(name + self._text, stream_interval=1)
        self.paces.append((time.monotonic(), events[-1]["timings"]["itl_p99_us"]))
        return content(events) == TEXT

    def chat(self, name: str) -> bool:
        answer = self._chat(name + self._text, logprobs=True, top_logprobs=2)
        return bool(answer["choices"][0]["message"]["content"] == TEXT)

    def completion(self, name: str) -> bool:
        body = {"prompt": [name + self._text] * 2, "max_tokens": 50, "logprobs": 1, "echo": True}
        return len(self._post("/v1/completions", **body)["choices"]) == 2

    def call(self, name: str) -> bool:
        events = self._server.stream_chat(name + self._call, tools=TOOLS)
        return bool(events[-1]["choices"][0]["finish_reason"] == "tool_calls")

    def grammar(self, name: str) -> bool:
        answer = self._chat(name + self._json, response_format={"type": "json_object"})
        return bool(json.loads(answer["choices"][0]["message"]["content"]) == {"a": 1})

    def response(self, name: str) -> bool:
        return bool(self._post("/v1/responses", input=name + self._thought)["status"] == "completed")

    def message(self, name: str) -> bool:
        messages = [{"role": "user", "content": name + self._thought}]
        answer = self._post("/v1/messages", messages=messages, max_tokens=50)
        return [block["type"] for block in answer["content"]] == ["thinking", "text"]

    def leave(self, name: str) -> bool:
        """A client that goes in the middle of its answer."""
        body = {"messages": [{"role": "user", "content": name + self._text}], "stream": True}
        with self._server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            return bool(next(read_events(response))["choices"])

    def wrong(self, name: str) -> bool:
        return "temperature" in self._chat(name, 400, temperature=9)["error"]["message"]

    def hostile(self, name: str) -> bool:
        shape = {"regex": "(" * 1000 + name}
        return "regex" in self._chat(name, 400, structured_outputs=shape)["error"]["message"]

    def conversation(self, name: str) -> bool:
        """A second question finds the first one's prefix."""
        messages = [{"role": "user", "content": name + "x" * 200}]
        for _ in range(2):
            answer = self._post("/v1/chat/completions", messages=messages)
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "And?"}]
        return bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 200)

    def count(self, name: str) -> bool:
        found = self._post("/tokenize", prompt=name)["tokens"]
        return bool(self._post("/detokenize", tokens=found)["prompt"] == name)


def fill_word_cache(server: Served) -> None:
    """tokenizers keeps the first 10,000 words that it splits. A prompt is one word to this model's tokenizer, of 3 KB
    with its tokens: 7,400 requests in five minutes were the 4.2 MiB a minute of a record that did not fill it first."""
    with server.client() as client:
        for number in range(WORDS):
            assert client.post("/tokenize", json={"prompt": f"word {number}"}).status_code == 200


def mappings_kib(pid: int) -> Counter[str]:
    """KiB in memory by what is mapped: [heap], a file's name, or "anonymous"."""
    found, name = Counter[str](), ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):  # a mapping's first line
            name = Path(words[5]).name if len(words) == 6 else "anonymous"
        elif words[0] == "Rss:":
            found[name] += int(words[1])
    return found


def mib_per_minute(samples: Sequence[tuple[float, int]]) -> float:
    """The slope of (s, KiB), by least squares."""
    return statistics.linear_regression(*zip(*samples, strict=True)).slope * 60 / 1024


def soak(server: Served, seconds: float, warm_up: int) -> dict[str, Any]:
    """Figures of `seconds` of requests one after the other, behind `warm_up` others of the same kinds.

    The first requests read code of libraries from its files, and fill caches that have a bound; memory is watched over
    all of `seconds`, in both processes, and its slope told of each half too: what leaks goes on in the second.
    """
    run = Soak(server)
    for _ in range(warm_up):
        run.one()
    run.paces.clear()
    pids = {"server": server.process.pid, "engine": server.engine_pid()}
    before = {name: mappings_kib(pid) for name, pid in pids.items()}
    memory: dict[str, list[tuple[float, int]]] = {name: [] for name in pids}
    begun, warmed = time.monotonic(), run.requests.total()
    while (now := time.monotonic()) - begun < seconds:
        run.one()
        for name, pid in pids.items():
            memory[name].append((now, memory_kib(pid)))
    middle = begun + seconds / 2
    both = [(at, kib + other) for (at, kib), (_, other) in zip(memory["server"], memory["engine"], strict=True)]
    early = statistics.median(pace for at, pace in run.paces if at < middle)
    late = statistics.median(pace for at, pace in run.paces if at >= middle)
    return {
        "seconds": seconds,
        "warm_up_requests": warm_up,
        "requests": run.requests.total() - warmed,
        "errors": run.errors.total(),
        "mib_per_minute": round(mib_per_minute(both), 3),
        "mib_per_minute_of_halves": [
            round(mib_per_minute([one for one in both if (one[0] >= middle) == late_half]), 3)
            for late_half in (False, True)
        ],
        "memory": {
            name: {
                "mib_per_minute": round(mib_per_minute(memory[name]), 3),
                "mib": [round(kib / 1024, 2) for _, kib in sampled(memory[name])],
                "grown_kib": dict((mappings_kib(pid) - before[name]).most_common(5)),
            }
            for name, pid in pids.items()
        },
        "itl_p99_us": [round(early, 1), round(late, 1)],
        "itl_p99_drift_percent": round(100 * (late / early - 1), 2),
    }


def sampled(samples: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """About eleven of them, at even distances in count, the last one too."""
    return samples[:: max(1, len(samples) // 10)] + samples[-1:]


def asked(found: dict[str, Any]) -> list[Asked]:
    return [
        Asked("R17: errors", found["errors"], 0),
        Asked("R17: MiB a minute", found["mib_per_minute"], 1),
        Asked("R17: drift of p99, percent", found["itl_p99_drift_percent"], 5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.server.soak")
    parser.add_argument("--seconds", type=float, default=SOAK_S, metavar="S")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, metavar="REQUESTS")
    parser.add_argument("--keep", action="store_true", help=f"write {RECORD.name}")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        flags = ["--max-num-seqs", "8", "--tool-call-parser", "hermes"]
        flags += ["--reasoning-parser", "think"]
        model = make_checkpoint(Path(place, "model"), max_context=1 << 16)
        with served(Path(place, "server"), model, *flags) as server:
            fill_word_cache(server)
            found = soak(server, args.seconds, args.warm_up)
    record = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "cores": sorted(os.sched_getaffinity(0)),
        "huge_pages": HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else None,
        "soak": found,
        "asked": by_name(asked(found)),
    }
    print(json.dumps(record, indent=2))
    print(*asked(found), sep="\n")
    if args.keep:
        kept_rows.write(RECORD, record)


if __name__ == "__main__":
    main()
