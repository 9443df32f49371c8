"""Replicas behind the SMG gateway, as docs/SERVER.md starts it: a conversation stays where its keys are, a replica that
dies under load takes no new request with it."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests import ROOT
from tests.lib.served import Served, served, wait_for

pytestmark = pytest.mark.slow
GRACE_S = 5.0  # behind which no new request may fail
LOAD_S = 12.0
CLIENTS = 3


def recipe():
    """The gateway's command line of docs/SERVER.md, from `smg launch` on."""
    page = (ROOT / "docs" / "SERVER.md").read_text(encoding="utf-8")
    start = page.index("    smg launch")
    return page[start : page.index("\n\n", start)].replace("\\\n", " ").split()


@contextmanager
def gateway(folder: Path, replicas: list[Served]):
    """The recipe, with these replicas and free ports."""
    import socket

    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    told = recipe()
    assert told[:2] == ["smg", "launch"]
    urls = iter(replicas)
    argv = [next(urls).url if word.startswith("http://") else word for word in told[1:]]
    for flag, port in (("--port", ports[0]), ("--prometheus-port", ports[1])):
        argv[argv.index(flag) + 1] = str(port)
    log = folder / "gateway.log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, "-m", "smg", *argv], stdout=file, stderr=file)
    client = httpx2.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=60)

    def ready():
        assert process.poll() is None, log.read_text()
        try:
            return client.get("/readiness").status_code == 200
        except httpx2.TransportError:
            return False

    try:
        wait_for(ready, 60)
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(30)


@pytest.fixture
def replicas(tmp_path):
    pytest.importorskip("smg")
    flags = ("--backend", "reference", "--max-num-seqs", "4")
    with (
        served(tmp_path / "a", None, *flags) as one,
        served(tmp_path / "b", None, *flags) as other,
        gateway(tmp_path, [one, other]) as client,
    ):
        yield one, other, client


def complete(client, session, prompt="def add(a, b):", tokens=4):
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return client.post("/v1/completions", json=body, headers={"x-smg-routing-key": session})


def test_a_conversation_stays_and_the_death_of_a_replica_costs_no_new_request(replicas, figure):
    one, other, client = replicas
    homes = {}
    for session in [f"s{i}" for i in range(6)]:
        prompt = f"# {session}\ndef add(a, b):"
        for again in range(2):
            before = one.metric("kog:prompt_tokens_total")
            answer = complete(client, session, prompt).json()
            home = one.metric("kog:prompt_tokens_total") > before
            assert homes.setdefault(session, home) == home
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0 or not again
            prompt += answer["choices"][0]["text"]
    assert set(homes.values()) == {True, False}  # both replicas have sessions
    found, stop = [], threading.Event()

    def load(session):
        while not stop.is_set():
            begun = time.monotonic()
            try:
                status = complete(client, session).status_code
            except httpx2.TransportError:
                status = 0
            found.append((begun, status))

    threads = [threading.Thread(target=load, args=(f"load{i}",)) for i in range(CLIENTS)]
    threads += [threading.Thread(target=load, args=(f"s{i}",)) for i in range(CLIENTS)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(found) > 2 * CLIENTS, 60)
    os.kill(one.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    time.sleep(LOAD_S)
    stop.set()
    for thread in threads:
        thread.join()
    after = [(begun - killed, status) for begun, status in found if begun > killed]
    late = [status for since, status in after if since > GRACE_S]
    assert len(late) > CLIENTS and set(late) == {200}
    failed = sum(status != 200 for _, status in found)
    figure("A28", f"{len(after)} requests behind a replica's death, {failed} of all failed")
    status = complete(client, next(s for s, home in homes.items() if home)).status_code
    assert status == 200  # its home is gone, it is answered elsewhere
    assert other.process.poll() is None
