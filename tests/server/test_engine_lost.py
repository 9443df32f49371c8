"""Engines that die, stand still or break: those who wait are told, and the next request finds another engine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.lib.served import content, read_events, served, wait_for

SILENT_S = 2.0  # this server's --engine-timeout
SLACK_S = 3.0  # on a loaded machine, to what an idle one needs


@pytest.fixture(scope="module")
def fragile(tmp_path_factory, checkpoint):
    flags = ("--engine-timeout", str(SILENT_S), "--max-num-seqs", "2")
    with served(tmp_path_factory.mktemp("fragile"), checkpoint, *flags) as running:
        yield running


def ready(server):
    return server.get("/ready").status_code == 200


def broken_stream(server, prompt):
    """(the events of a stream that breaks off, the seconds from its first to its last)"""
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True}
    with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        events, times = [], []
        for event in read_events(response):
            events.append(event)
            times.append(time.monotonic())
    return events, times[-1] - times[0]


@pytest.mark.parametrize(
    ("name", "fault", "within"),
    [("R2", "exit", 1.0), ("R1", "hang", SILENT_S + 1.0), ("R1, whole process", "freeze", SILENT_S + 1.0)],
)
def test_a_stream_is_told_that_its_engine_is_lost(fragile, figure, name, fault, within):
    before, made = fragile.metric("kog:engine_restarts_total"), fragile.metric("kog:generation_tokens_total")
    prompt = fragile.play(fault, "abcdefgh", tokens_per_s=50, faults={"4": fault})
    events, seconds = broken_stream(fragile, prompt)
    assert content(events[:-1]) == "abcd"
    assert fragile.metric("kog:generation_tokens_total") == made + 4
    assert events[-1]["error"]["code"] == "engine_lost"
    assert "send it again" in events[-1]["error"]["message"]
    assert fragile.get("/version").status_code == 200
    again = wait_for(lambda: ready(fragile))
    assert fragile.chat("x")["choices"][0]["message"]["content"] == "ok"
    assert fragile.metric("kog:engine_restarts_total") == before + 1
    assert seconds < within + SLACK_S
    figure(name, f"error event {seconds:.2f} s after the first token, ready again {again:.1f} s later")


@pytest.mark.parametrize("script", [{"pass": 32, "pass_s": 0.4}, {"faults": {"prompt": "compile"}}])
def test_what_takes_longer_than_the_timeout_and_goes_on_is_let(fragile, figure, script):
    """A prompt of many passes, and a kernel that is compiled in its first launch."""
    restarts = fragile.metric("kog:engine_restarts_total")
    begun = time.monotonic()
    answer = fragile.chat("x" * 400 + fragile.play("long", "abc", **script))
    seconds = time.monotonic() - begun
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert seconds > 2 * SILENT_S
    assert fragile.metric("kog:engine_restarts_total") == restarts
    figure("R1", f"a prompt of {seconds:.1f} s under --engine-timeout {SILENT_S:g} by {next(iter(script))}")


def test_a_device_that_hangs_in_a_prompt_is_found(fragile, figure):
    restarts = fragile.metric("kog:engine_restarts_total")
    prompt = fragile.play("hangs", "abc", faults={"prompt": "hang"})
    body = {"messages": [{"role": "user", "content": prompt}]}
    begun = time.monotonic()
    response = fragile.post("/v1/chat/completions", body)
    seconds = time.monotonic() - begun
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_lost")
    wait_for(lambda: ready(fragile))
    assert fragile.metric("kog:engine_restarts_total") == restarts + 1
    figure("R1, in a prompt", f"503 after {seconds:.2f} s")


@pytest.mark.slow
def test_twenty_engines_are_lost_one_after_the_other(fragile, figure):
    worst = 0.0
    for _ in range(20):
        prompt = fragile.play("exit", "abcdefgh", tokens_per_s=50, faults={"4": "exit"})
        events, seconds = broken_stream(fragile, prompt)
        assert events[-1]["error"]["code"] == "engine_lost"
        worst = max(worst, seconds)
        wait_for(lambda: ready(fragile))
        assert fragile.chat("x")["choices"][0]["message"]["content"] == "ok"
    figure("R2", f"20 of 20 engines killed in a stream, the error event at most {worst:.2f} s after the first token")


def test_while_an_engine_starts_again_requests_are_refused_at_once(fragile, figure):
    os.kill(fragile.engine_pid(), signal.SIGKILL)
    took = wait_for(lambda: not ready(fragile))
    response = fragile.post("/v1/completions", {"prompt": "x"})
    health = fragile.get("/health").status_code
    assert fragile.get("/props").json()["memory_bytes"] == {}
    wait_for(lambda: ready(fragile))
    assert (response.status_code, health) == (503, 503)
    assert response.headers["retry-after"]
    figure("R1", f"/health 503 {took * 1e3:.0f} ms after the engine was killed")


@pytest.mark.parametrize(
    ("name", "fault", "status", "says"),
    [
        ("R4", "nan", 500, "NaN"),
        ("R16", "memory", 503, "out of memory"),
        ("R4, backend raises", "crash", 500, "the device is gone"),
    ],
)
def test_a_request_that_fails_fails_alone(fragile, figure, name, fault, status, says):
    """Also with another stream beside it, but where the backend itself raises."""
    restarts = fragile.metric("kog:engine_restarts_total")
    body = {"messages": [{"role": "user", "content": fragile.play(fault, "abc", faults={"2": fault})}]}
    clean = fragile.chat("x")["choices"][0]["message"]
    response = fragile.post("/v1/chat/completions", body)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]
    assert fragile.chat("x")["choices"][0]["message"] == clean
    assert fragile.metric("kog:engine_restarts_total") == restarts
    events, _ = broken_stream(fragile, body["messages"][0]["content"])
    assert says in events[-1]["error"]["message"]
    if fault == "nan":
        assert fragile.metric("kog:corrupted_requests_total") >= 2
    figure(name, f"{status}, next answer as before, no restart")


def test_a_device_that_is_gone_for_good_ends_its_engine(fragile, figure):
    """After a second request that it failed, for whatever reason the first one did."""
    restarts = fragile.metric("kog:engine_restarts_total")
    for prompt in (fragile.play("lost", "abc", faults={"1": "gone"}), "x"):
        body = {"messages": [{"role": "user", "content": prompt}]}
        response = fragile.post("/v1/chat/completions", body)
        assert response.status_code == 500
        assert "the device is gone" in response.json()["error"]["message"]
    restarted = wait_for(lambda: fragile.metric("kog:engine_restarts_total") == restarts + 1)
    wait_for(lambda: ready(fragile))
    assert fragile.chat("x")["choices"][0]["message"]["content"] == "ok"
    figure("R4, for good", f"a new engine {restarted:.1f} s after the second failure")


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z"
    except FileNotFoundError:
        return True


def test_the_engine_ends_with_the_server(tmp_path, checkpoint, figure):
    with served(tmp_path, checkpoint) as server:
        pid = server.engine_pid()
        server.process.kill()
        seconds = wait_for(lambda: gone(pid))
    assert seconds < 2.0 + SLACK_S
    figure("R3", f"engine gone {seconds * 1e3:.0f} ms after the server was killed")


def start(*flags, **environment):
    """(exit code, stderr, seconds) of a server that cannot start."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "kog_triton.serve", *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr, time.monotonic() - begun


def test_what_keeps_a_server_from_starting_is_one_line(fragile, checkpoint, tmp_path, figure):
    cases = {
        "port busy": (2, "cannot listen", ("--port", str(fragile.port))),
        "no such model": (3, "no such folder", ("--port", "0", "--model", str(tmp_path / "none"))),
        "no such backend": (2, "no backend named", ("--port", "0", "--backend", "none")),
        "no GPU": (4, "cannot run here", ("--port", "0", "--backend", "cuda")),
        "bad flag": (2, "--port", ("--port", "99999")),
        "bad parser": (2, "tool_call_parser", ("--tool-call-parser", "x")),
    }
    if Path("/dev/nvidiactl").exists():
        del cases["no GPU"]
    for what, (code, says, flags) in cases.items():
        found, stderr, seconds = start(*flags)
        last = stderr.strip().splitlines()[-1]
        assert (found, says in last) == (code, True), (what, found, stderr)
        assert "Traceback" not in stderr
        figure("R22", f"{what}: exit code {code} after {seconds:.1f} s")


DRIVER = r"""
#include <cstring>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGet(int* device, int) { *device = 0; return 0; }
int cuDeviceGetName(char* name, int, int) { std::strcpy(name, "NVIDIA H200"); return 0; }
int cuDeviceTotalMem_v2(std::size_t* bytes, int) { *bytes = 150000000000; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { *value = attribute == 75 ? 9 : 0; return 0; }
}
"""  # cuda.h: attribute 75 is the capability's first number


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="torch sees this machine's own GPU")
def test_a_driver_that_torch_cannot_use_is_one_line(checkpoint, tmp_path, figure):
    """A machine with an H200 by its driver's word, of which torch sees nothing: no silent fall to the CPU."""
    source = tmp_path / "driver.cpp"
    source.write_text(DRIVER)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    flags = ("--port", "0", "--model", str(checkpoint))
    code, stderr, seconds = start(*flags, LD_LIBRARY_PATH=str(tmp_path))
    last = stderr.strip().splitlines()[-1]
    assert code == 4 and "NVIDIA H200" in last and "install" in last, stderr
    assert "Traceback" not in stderr
    figure("R22", f"a driver that torch cannot use: exit code {code} after {seconds:.1f} s")


def test_a_server_needs_no_folder_that_it_can_write_to(checkpoint, tmp_path, figure):
    nowhere = "/proc/none"  # not even root makes a folder there
    places = {"XDG_CACHE_HOME": nowhere, "XDG_STATE_HOME": nowhere, "HOME": nowhere}
    with served(tmp_path / "server", checkpoint, **places) as running:
        assert running.chat("hello")["choices"][0]["message"]["content"] == "ok"
        told = running.log.read_text()
    assert "Traceback" not in told
    first, *_, last = told.splitlines()  # whoever waits for a large model sees why
    assert first.startswith(f"loading {checkpoint}: until then http://127.0.0.1:")
    assert last.startswith("serving http://127.0.0.1:")
    figure("R22", "no cache that can be written to: it serves")


def test_a_model_that_does_not_fit_ends_with_the_devices_exit_code(tmp_path, checkpoint, figure):
    from tests.lib import scripted_backend

    site = scripted_backend.install(tmp_path / "site")
    path = os.pathsep.join([str(site), str(ROOT)])
    flags = ("--port", "0", "--model", str(checkpoint), "--backend", "scripted")
    code, stderr, _ = start(*flags, PYTHONPATH=path, KOG_SCRIPTED_REFUSES="1")
    assert code == 4
    assert "99 GB" in stderr.strip().splitlines()[-1]
    figure("R16", "a model that does not fit: exit code 4, the figures in one line")


def test_a_server_drains_what_runs(tmp_path, checkpoint, figure):
    """SIGTERM with three streams: all end well, nobody new comes in, exit code 0."""
    import threading

    with served(tmp_path, checkpoint) as server:
        prompt = server.play("long", "x" * 60, tokens_per_s=30)
        found = {}

        def read(i):
            found[i] = content(server.stream_chat(prompt))

        threads = [threading.Thread(target=read, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.metric("kog:num_requests_running") == 3)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: not ready(server))
        seconds = time.monotonic() - begun
        assert server.get("/health").status_code == 200
        refused = server.post("/v1/completions", {"prompt": "x"})
        for thread in threads:
            thread.join()
        assert server.process.wait(30) == 0
    assert found == dict.fromkeys(range(3), "x" * 60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    figure("R7", f"/ready 503 {seconds * 1e3:.0f} ms after SIGTERM, three streams ended well, exit code 0")


def test_a_second_signal_ends_the_server_at_once(tmp_path, checkpoint, figure):
    with served(tmp_path, checkpoint) as server:
        prompt = server.play("endless", "x" * 400, tokens_per_s=2)
        body = {"messages": [{"role": "user", "content": prompt}], "stream": True}
        with server.client() as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.iter_lines()  # closed, it would close the connection
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: not ready(server))
            begun = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(30) == 0
            seconds = time.monotonic() - begun
    assert seconds < 2.0 + SLACK_S
    figure("R7", f"ended {seconds:.1f} s after a second SIGTERM")


def test_the_servers_process_needs_no_torch_and_says_what_it_does_need():
    """Also not through what its modules import in turn."""
    code = "import sys; sys.modules['torch'] = None; import kog_triton.server.run, kog_triton.server.child"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    code = "import sys; sys.modules['uvicorn'] = None; from kog_triton import serve; sys.exit(serve.main([]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: kog serve needs uvicorn: pip install 'kog-triton[serve]'\n"


def test_an_engine_that_fails_says_why():
    """A request's panic is an error of its own; what ends the process is on stderr, and in its status."""
    program = """
import os, sys, socket
from types import SimpleNamespace
from kog_triton.server import child, wire

class PanicException(BaseException): pass
def panics(*given, **more): raise PanicException("unreachable")
told, llm = [], SimpleNamespace(engine=SimpleNamespace(prepare=panics, closed=True))
server = child.EngineServer(llm, SimpleNamespace(send=told.append))
server.start(SimpleNamespace(id=7, prompt=(1,), params=None, cache_salt="", sample_idx=0))
assert b"unreachable" in told[0]
def breaks(channel): raise SystemError("broken")
child.serve = breaks
ours, theirs = socket.socketpair()
sys.argv = ["child", str(theirs.detach())]
child.main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("SystemError: broken")
