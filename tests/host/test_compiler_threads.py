"""Python's end waits for threads in a compiler of its own process, which would abort it; a command leaves them."""

import subprocess
import sys
import time

import pytest

BESIDE = """
import time
from pathlib import Path
from kog_triton.backends.compiled_beside import CompiledBeside
from kog_triton.cli.command import end_process, run

def compile(seconds):
    time.sleep(seconds)
    Path({path!r}).touch()

def begin(seconds, inside):
    CompiledBeside(compile, str, inside=inside).begin(seconds)
"""


@pytest.fixture
def ends(tmp_path):
    def run(last):
        """Exit code, stdout and stderr of a process, and whether it has compiled."""
        made = tmp_path / "made"
        code = BESIDE.format(path=str(made)) + last
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr, made.exists()

    return run


def test_pythons_end_waits_for_what_is_compiled_inside_the_process(ends):
    code, out, err, made = ends("begin(1, True)")
    assert (code, out, made) == (0, "", True)
    assert err == "a kernel is still compiled: Python ends behind it, and the next start finds it\n"


def test_it_waits_for_no_compiler_that_is_a_process_of_its_own(ends):
    assert ends("begin(1, False)") == (0, "", "", False)


def test_a_command_leaves_what_is_compiled(ends):
    begun = time.monotonic()
    assert ends("begin(50, True); end_process(lambda: run(lambda _: print('said') or 3, ()))") == (
        3,
        "said\n",
        "",
        False,
    )
    assert time.monotonic() - begun < 45  # the other ways wait
