"""Python's end waits for threads in a compiler of its own process, which would abort it; a command leaves them."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from kog_triton.backends import compiler_threads
from kog_triton.backends.prefill import fused_ahead
from kog_triton.backends.triton.host.shared_steps import SharedSteps

BESIDE = """
import time
from pathlib import Path
import kog_triton.engine
from kog_triton.backends.compiled_beside import CompiledBeside
from kog_triton.cli.command import end_process, run

def compile(seconds):
    time.sleep(seconds)
    Path({path!r}).touch()

def begin(seconds, inside):
    CompiledBeside(compile, str, inside=inside).begin(seconds)
"""

SAID = "a kernel is still compiled: Python ends behind it, and the next start finds it; Ctrl-C leaves it\n"


@pytest.fixture
def ends(tmp_path):
    def run(last, until=""):
        """Exit code, stdout and stderr of a process, and whether it has compiled. Ctrl-C once it says so on stderr."""
        made = tmp_path / "made"
        code = BESIDE.format(path=str(made)) + last
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen([sys.executable, "-c", code], env=env, text=True, preexec_fn=default, **pipes)
        told = ""
        while until and until not in told:
            told += process.stderr.readline()
        if until:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, told + err, made.exists()

    return run


def default():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_pythons_end_waits_for_what_is_compiled_inside_the_process(ends):
    code, out, err, made = ends("begin(1, True)")
    assert (code, out, made) == (0, "", True)
    assert err == SAID


def test_engines_are_closed_before_that(ends):
    """What they begin until then is waited for."""
    opened = "class Engine:\n    def close(self):\n        begin(1, True)\n"
    assert ends(f"{opened}engine = Engine(); kog_triton.engine._open_engines.add(engine)") == (0, "", SAID, True)


def test_ctrl_c_ends_the_wait_and_the_process(ends):
    assert ends("print('said'); begin(50, True)", "Ctrl-C leaves it") == (130, "said\n", SAID, False)


def test_it_waits_for_no_compiler_that_is_a_process_of_its_own(ends):
    assert ends("begin(1, False)") == (0, "", "", False)


def test_a_command_leaves_what_is_compiled_and_keeps_what_it_said(ends):
    begun = time.monotonic()
    stopped = "begin(50, True)\ndef body(_):\n    print('said')\n    raise KeyboardInterrupt\n"
    assert ends(f"{stopped}end_process(lambda: run(body, ()))") == (130, "said\n", "interrupted\n", False)
    assert ends("begin(50, True); end_process(lambda: run(lambda _: print('said') or 3, ()))") == (
        3,
        "said\n",
        "",
        False,
    )
    assert time.monotonic() - begun < 45  # the other ways wait


def test_who_compiles_inside_the_process_says_so(monkeypatch):
    """Kernels in which requests share a step, and those of passes."""
    go, begun = threading.Event(), threading.Semaphore(0)

    def compile(*_):
        begun.release()
        go.wait(60)

    monkeypatch.setattr(fused_ahead, "_compile", compile)
    bare = fused_ahead.Arguments(*[None] * len(fused_ahead.Arguments._fields))
    steps, before = SharedSteps(2, compile), set(compiler_threads.running())
    assert steps.ready(2, False) == 1
    ahead = fused_ahead.FusedAhead(bare, torch.device("cpu"))
    assert all(begun.acquire(timeout=30) for _ in range(2))
    assert len(set(compiler_threads.running()) - before) == 2
    go.set()
    ahead.wait()
    steps.settle()
    assert set(compiler_threads.running()) <= before
