"""Ctrl-C at any moment of a command, closed pipes and full disks: one line at most, never a traceback or an abort.

Moments are counted from where a command's own code begins: Python's start is its own.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT
from tests.lib.slow import some_always

# says so on stdout's descriptor before the command begins
BEGIN = ["-c", "import os, sys; from kog_triton.__main__ import entry; os.write(3, b'x'); os.close(3); entry()"]
UPLOADING = ["-m", "tests.lib.uploading_child"]
COMMANDS = {
    "generate": ["generate", "-p", "def add(a, b):", "--temp", "0", "-m", "24"],
    "plan": ["plan", "--shape", "llama-3.2-1b"],
    "doctor": ["doctor"],
    "bench": ["bench", "decode", "--max-tokens", "4", "--rounds", "1", "--warmup", "1", "--depth", "4"],
}  # fmt: skip
SECONDS = 120


class Command:
    """A command in a process of its own, which has written so many bytes to descriptor 3 when this returns."""

    def __init__(self, argv, python=BEGIN, count=1, **streams):
        ready, begun = os.pipe()

        def prepare():
            os.dup2(begun, 3)
            # what a shell runs in the background ignores Ctrl-C, and so would its children
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
        self.process = subprocess.Popen(
            [sys.executable, *python, *argv],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            preexec_fn=prepare,
            pass_fds=(3,),
            **pipes,
        )
        os.close(begun)
        for _ in range(count):
            assert os.read(ready, 1)
        os.close(ready)
        self.begun = time.monotonic()

    def interrupted_after(self, seconds):
        """Exit code and stderr of one that is interrupted then, unless it has ended."""
        try:
            self.process.wait(max(0.0, seconds - (time.monotonic() - self.begun)))
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, err.decode()


def sweep(name, moments):
    """How the command ended at each of so many moments, evenly spaced over the time it takes."""
    whole = Command(COMMANDS[name])
    whole.process.communicate(timeout=SECONDS)
    took = time.monotonic() - whole.begun
    assert whole.process.returncode == 0
    ends = []
    for moment in range(moments):
        code, err = Command(COMMANDS[name]).interrupted_after(took * (moment + 0.5) / moments)
        # while Python ends, its handlers are gone and the signal itself ends the process, as it does any
        assert code in (0, 130, -signal.SIGINT), f"at {moment} of {moments}: {code}\n{err}"
        assert "Traceback" not in err and "terminate called" not in err and "Error" not in err
        assert code != 130 or "interrupted" in err or "; abort\n" in err, err
        ends.append(code)
    return ends


@pytest.mark.parametrize("name", some_always(COMMANDS, "generate", "plan"))
def test_ctrl_c_at_ten_moments(name):
    assert 130 in sweep(name, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_two_hundred_moments(name):
    assert 130 in sweep(name, 200)


@pytest.mark.parametrize("reads", [1, 60])
@pytest.mark.parametrize("name", ["generate", "bench"])
def test_ctrl_c_while_threads_read_the_weights(name, reads):
    """`generate` ends on the spot; in `bench`, as in a script, it is an exception, behind which no thread is left."""
    command = Command([*COMMANDS[name], "--backend", "reference"], UPLOADING, reads)
    code, err = command.interrupted_after(0)
    assert code == 130 and "Traceback" not in err and "Error" not in err
    lines = err.splitlines()
    if name == "bench":
        assert lines.pop() == "0 reads, threads: MainThread"
    assert lines[-1] == "interrupted"


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["plan"], ["plan", "--help"], ["cache"]])
def test_a_reader_that_left_ends_a_command_quietly(argv):
    ours, theirs = os.pipe()
    os.close(ours)
    command = Command(argv, stdout=theirs)
    os.close(theirs)
    _, err = command.process.communicate(timeout=SECONDS)
    assert (command.process.returncode, err) == (0, b"")


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["generate", "--help"], ["plan"], ["doctor", "--json"]])
def test_a_full_disk_is_one_line(argv):
    with open("/dev/full", "wb") as full:
        command = Command(argv, stdout=full)
    _, err = command.process.communicate(timeout=SECONDS)
    assert (command.process.returncode, err) == (2, b"error: No space left on device: standard output\n")
