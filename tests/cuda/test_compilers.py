"""Kernels compile side by side in processes of their own, which end with the process that began them, however it ends.

The compiler is a script in the place of nvcc: it notes when it begins, waits for a word, and makes of a source the
source.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from kog_triton.backends.cuda import compile_child, compilers, jit, kernel_cache, toolchain
from kog_triton.backends.cuda.compilers import Background
from kog_triton.errors import DeviceError

# Of one line "// NAME" at a source's head: begun/NAME holds its process; it ends once ended/NAME is there.
NVCC = r"""#!/bin/sh
if [ "$1" = --version ]; then echo 'Build cuda_13.0'; exit; fi
for last; do out=$last; case $last in *.cu) source=$last;; esac; done
name=$(head -1 "$source" | tr -d '/ ')
echo $$ > {folder}/begun/$name.part; mv {folder}/begun/$name.part {folder}/begun/$name
until [ -e {folder}/ended/$name ] || [ ! -d {folder} ]; do sleep 0.02; done  # nor without its test
case $name in refused*) echo 'error: expected a ";"' >&2; exit 2;; killed*) kill -9 $PPID; sleep 9;; esac
cp "$source" "$out"
"""
WAIT_S = 60


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """The folder of that compiler, the only one; its cubins are kept nowhere else."""
    for name in ("begun", "ended"):
        (tmp_path / name).mkdir()
    script = tmp_path / "nvcc"
    script.write_text(NVCC.replace("{folder}", str(tmp_path)))
    script.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda: None)
    monkeypatch.setattr(jit, "PROCESSES", Background(3))
    monkeypatch.setattr(jit, "_begun", {})
    monkeypatch.setattr(kernel_cache, "_unwritten", {})
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def until(true, what):
    begun = time.monotonic()
    while not true():
        assert time.monotonic() - begun < WAIT_S, what
        time.sleep(0.01)


def begun(folder):
    return sorted(path.name for path in (folder / "begun").iterdir() if "." not in path.name)


def end(folder, *names):
    for name in names:
        (folder / "ended" / name).touch()


def alive(pid):
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_as_many_compile_at_a_time_as_there_are_places_in_the_order_asked(nvcc):
    for name in "abcde":
        jit.begin_cubin(f"// {name}\n")
    until(lambda: begun(nvcc) == [*"abc"], "three begin side by side")
    pids = {int((nvcc / "begun" / name).read_text()) for name in "abc"}
    assert len(pids) == 3 and all(map(alive, pids))
    end(nvcc, "b")
    assert jit.compile_cubin("// b\n").startswith(b"// b\n")  # and waits for no other
    until(lambda: begun(nvcc) == [*"abcd"], "the fourth takes the place")
    end(nvcc, *"acde")
    assert [jit.compile_cubin(f"// {n}\n")[:4].decode() for n in "acde"] == [f"// {n}" for n in "acde"]
    assert len(list(kernel_cache.cache_folder().iterdir())) == 5 and not jit._begun


def test_a_later_start_compiles_nothing(nvcc):
    end(nvcc, "a")
    whole = jit.compile_cubin("// a\n")
    (nvcc / "begun" / "a").unlink()
    assert jit.compile_cubin("// a\n") == whole and begun(nvcc) == []


def test_a_compiler_that_refuses_or_is_killed_is_told_and_asked_again(nvcc):
    end(nvcc, "refused", "killed")
    for _ in range(2):
        with pytest.raises(DeviceError, match=r'nvcc refuses the kernel:\nerror: expected a ";"'):
            jit.compile_cubin("// refused\n")
        assert begun(nvcc) == ["refused"]
        (nvcc / "begun" / "refused").unlink()
    with pytest.raises(DeviceError, match=r"the compiler of decode\.cu was killed or broke off"):
        jit.compile_cubin("// killed\n")
    assert not list(kernel_cache.cache_folder().parent.rglob("*.cubin"))


def test_a_compiler_that_is_gone_meanwhile_is_told(monkeypatch):
    def gone(*given):
        raise FileNotFoundError(2, "No such file", "nvcc")

    monkeypatch.setattr(compile_child, "translate", gone)
    job = json.dumps({"source": "decode.cu", "flags": [], "compiler": "nvcc 1"}).encode()
    how = compile_child.compile_job(job, b"")
    assert how[:1] == compile_child.REFUSED
    assert b"decode.cu: FileNotFoundError: " in how and b"nvcc" in how


def test_progress_says_how_many_are_to_come(nvcc, caplog):
    caplog.set_level("INFO", "kog_triton.compilers")
    for name in "abc":
        jit.begin_cubin(f"// {name}\n")
    until(lambda: len(begun(nvcc)) == 3, "three begin")
    for name in "abc":
        end(nvcc, name)
        jit.compile_cubin(f"// {name}\n")
    ends = [m.partition(" s")[2] for m in caplog.messages if m.startswith("compiled ")]
    assert ends == [", 2 more to come", ", 1 more to come", ""]


PROGRAM = """
import os, signal, sys
from kog_triton.backends.cuda import jit, toolchain
toolchain.find_nvrtc = lambda: None
for name in "ab":
    jit.begin_cubin(f"// {name}\\n")
while len([n for n in os.listdir(sys.argv[1] + "/begun") if "." not in n]) < 2:
    pass
print("text", flush=True)
how = sys.argv[2]
if how == "returns":
    pass
elif how == "raises":
    raise KeyboardInterrupt
elif how == "leaves":
    os._exit(0)
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two compilers take two cores")
@pytest.mark.parametrize("how", ["returns", "raises", "leaves", "is killed"])
def test_no_compiler_keeps_a_process_or_lives_on_after_it(nvcc, how):
    """It waited for 8 s, until its compiler was done with the kernel of prompts."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(nvcc), how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"text\n"
        pids = [int((nvcc / "begun" / name).read_text()) for name in "ab"]
        process.wait(WAIT_S)  # though no compiler has ended
        until(lambda: not any(map(alive, pids)), "the compilers end with it")
    assert process.returncode == {"returns": 0, "leaves": 0, "is killed": -signal.SIGKILL}.get(how, -2)
    assert not list((nvcc / "cache").rglob("*.cubin"))


@pytest.mark.parametrize("own", [None, "glibc.malloc.arena_max=1"])
def test_compilers_are_told_of_huge_pages_unless_the_user_tunes_malloc(nvcc, monkeypatch, own):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    jit.begin_cubin("// a\n")
    until(lambda: begun(nvcc) == ["a"], "it begins")
    assert compilers._server._process is not None
    told = Path(f"/proc/{compilers._server._process.pid}/environ").read_bytes()
    end(nvcc, "a")
    jit.compile_cubin("// a\n")
    # glibc ends the settings there as it reads them
    expected = f":GLIBC_TUNABLES={own or compilers.MALLOC}:"
    assert expected in ":" + told.replace(b"\0", b":").decode()


def test_a_compiler_begins_without_the_package():
    """A start waits for it: numpy and the package cost it a second where Python has kept no bytecode."""
    child = [sys.executable, "-X", "importtime", "-P", compile_child.__file__]
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen(child, stdin=theirs, stderr=subprocess.PIPE, text=True) as process:
        ours.close()  # nobody asks: it ends
        said = process.communicate(timeout=WAIT_S)[1]
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines()}
    assert process.returncode == 0 and "subprocess" in imported
    assert not {name for name in imported if name.partition(".")[0] in ("kog_triton", "numpy")}


def test_kernels_that_compile_side_by_side_are_forks_of_one_process(nvcc):
    """Which ends with the last of them; the next kernel has another."""
    for name in "abc":
        jit.begin_cubin(f"// {name}\n")
    until(lambda: begun(nvcc) == [*"abc"], "three begin side by side")
    server = compilers._server._process
    assert server is not None and server.poll() is None
    forks = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    assert len(forks) == 3
    end(nvcc, *"abcd")
    for name in "abc":
        jit.compile_cubin(f"// {name}\n")
    until(lambda: server.poll() is not None, "it ends")
    assert jit.compile_cubin("// d\n").startswith(b"// d\n")
    assert compilers._server._process is not server


def test_a_killed_server_ends_its_forks_and_is_replaced(nvcc):
    jit.begin_cubin("// a\n")
    until(lambda: begun(nvcc) == ["a"], "one begins")
    server, compiler = compilers._server._process, int((nvcc / "begun" / "a").read_text())
    (compiled,) = jit._begun.values()
    assert server is not None
    server.kill()
    with pytest.raises(DeviceError, match=r"the compiler of decode\.cu was killed or broke off"):
        compiled.result(WAIT_S)
    until(lambda: not alive(compiler), "its compiler ends")
    end(nvcc, "b")
    assert jit.compile_cubin("// b\n").startswith(b"// b\n")


# ---- Background ----


def test_background_runs_in_order_and_at_most_so_many():
    beside, running, most, order = Background(2), 0, 0, []
    lock, gate = threading.Lock(), threading.Event()

    def work(n):
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
            order.append(n)
        gate.wait(WAIT_S)
        with lock:
            running -= 1
        return n * n

    futures = [beside.submit(work, n) for n in range(6)]
    until(lambda: running == 2, "two run")
    gate.set()
    assert [f.result(WAIT_S) for f in futures] == [0, 1, 4, 9, 16, 25]
    assert most == 2 and sorted(order[:2]) == [0, 1] and sorted(order) == [*range(6)]


def test_an_error_in_the_background_goes_to_who_asks():
    beside = Background(1)
    failed: Future = beside.submit(int, "x")
    with pytest.raises(ValueError):
        failed.result(WAIT_S)
    assert beside.submit(int, "7").result(WAIT_S) == 7


def test_all_cores_of_this_process_compile():
    cores = len(os.sched_getaffinity(0))
    assert compilers.PROCESSES._most == (cores if cores < 6 else cores - 1)
