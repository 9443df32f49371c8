"""`kog serve` in a process of its own on a free port of 127.0.0.1, and a client that reads its events."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from tests import ROOT
from tests.lib import scripted_backend

START_S = 90.0  # for a server to be ready on a loaded machine
WAIT_S = 30.0  # for whatever a test waits for


@dataclass
class Served:
    process: subprocess.Popen[str]
    port: int
    scripts: Path
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **headers: str) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=WAIT_S, headers=headers)

    def play(self, name: str, text: str | bytes | list[int], **script: Any) -> str:
        """Write a script; the words of a prompt that plays it."""
        data = text.encode() if isinstance(text, str) else text
        path = self.scripts / f"{name}.json"
        path.write_text(json.dumps({"ids": list(data), **script}))
        return f"play:{name}"

    def get(self, path: str, **headers: str) -> httpx2.Response:
        with self.client(**headers) as client:
            return client.get(path)

    def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        with self.client(**headers) as client:
            return client.post(path, json=body)

    def chat(self, prompt: str, **fields: Any) -> dict[str, Any]:
        """An answer to one message; it must be one."""
        body = {"messages": [{"role": "user", "content": prompt}], **fields}
        response = self.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream that ends well, without [DONE]."""
        with self.client() as client, client.stream("POST", path, json={**body, "stream": True}) as response:
            found = list(read_events(response))
        assert found[-1] == "[DONE]", found[-1]
        return found[:-1]

    def stream_chat(self, prompt: str, **fields: Any) -> list[dict[str, Any]]:
        body = {"messages": [{"role": "user", "content": prompt}], **fields}
        return self.events("/v1/chat/completions", body)

    def metric(self, name: str) -> float:
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"/metrics has no {name}")

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            if b"kog_triton.server.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise AssertionError("the server has no engine process")


def read_events(response: httpx2.Response) -> Iterator[Any]:
    """The data of server-sent events, comments left out; "[DONE]" as it is. No stream may last for ever."""
    assert response.status_code == 200, response.read()
    end = time.monotonic() + WAIT_S
    for line in response.iter_lines():
        assert time.monotonic() < end, "the stream does not end"
        if line.startswith("data: "):
            data = line[6:]
            yield data if data == "[DONE]" else json.loads(data)


def wait_for(condition: Any, seconds: float = WAIT_S) -> float:
    """Seconds until it holds; an AssertionError after too many."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "it never came"
        time.sleep(0.005)
    return time.monotonic() - begun


@contextmanager
def served(folder: Path, checkpoint: Path | None, *flags: str, **environment: str) -> Iterator[Served]:
    """A server with the scripted backend, unless the flags name another; ended by SIGTERM."""
    (folder / "scripts").mkdir(parents=True)
    site = scripted_backend.install(folder / "site")
    log = folder / "log"
    chosen = () if "--backend" in flags else ("--backend", "scripted")
    model = () if checkpoint is None else ("--model", str(checkpoint))
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "kog_triton.serve", "--port", "0", *chosen, *model, *flags],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(site), str(ROOT), *_python_path()]),
                "KOG_SCRIPTS": str(folder / "scripts"),
                **environment,
            },
        )
    try:
        yield Served(process, _port(process, log), folder / "scripts", log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait()


def _python_path() -> list[str]:
    """Where this process was told to look for packages."""
    return list(filter(None, [os.environ.get("PYTHONPATH")]))


def _port(process: subprocess.Popen[str], log: Path) -> int:
    begun = time.monotonic()
    while not (found := re.search(r"serving http://127\.0\.0\.1:(\d+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() - begun < START_S, log.read_text()
        time.sleep(0.05)
    return int(found[1])


def content(events: list[dict[str, Any]], key: str = "content", index: int = 0) -> str:
    """What the chat events of one choice say, joined."""
    deltas = [c["delta"] for e in events for c in e["choices"] if c["index"] == index]
    return "".join(delta.get(key) or "" for delta in deltas)
