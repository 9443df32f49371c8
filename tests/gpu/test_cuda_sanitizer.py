"""compute-sanitizer finds nothing in the CUDA kernels, and does find what is planted there.

Every kind of kernel is watched: of one token, of several columns, of chunks of a prompt, of lanes, with joins
of many splits, the one that takes stamps, and those that read narrow weights: for one token, for several columns and
chunks, in products of prompts, and to unpack them (sanitized_child.py).
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.lib.machine_code import tool as disassembler
from tests.lib.racecheck import functions_in, races_in, unexplained
from tests.lib.sanitized_child import CASES

pytestmark = pytest.mark.gpu
TIMEOUT_S = 300
OURS = ("--kernel-name", "kernel_substring=kog_")
# initcheck watches every kernel: torch's are what fills memory
TOOLS = {"memcheck": OURS, "racecheck": OURS, "synccheck": OURS, "initcheck": ()}
# What racecheck follows the ring by; the others judge the kernel as it is.
NO_FAULT = {"racecheck": "all arrive"}
# initcheck takes the longest: of the kernels that differ in what they read.
WATCHED = [*((tool, case) for tool in TOOLS if tool != "initcheck" for case in CASES),
           *(("initcheck", case) for case in ("one-token", "columns", "chunks", "unpack"))]  # fmt: skip
PLANTED = [*((tool, "one-token", tool) for tool in TOOLS), ("memcheck", "lanes", "memcheck"),
           *((tool, "unpack", f"unpack {tool}") for tool in ("memcheck", "initcheck")),
           ("racecheck", "columns", "racecheck"),
           *((tool, case, f"{case} {tool}")
             for case in ("narrow", "narrow prompt") for tool in ("memcheck", "racecheck")),
           ("memcheck", "narrow columns", "narrow memcheck"),
           *(("racecheck", case, "early release")
             for case in ("one-token", "columns", "narrow", "narrow columns"))]  # fmt: skip


def find_sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        pytest.skip("needs compute-sanitizer, of the GPU's toolkit, on the PATH")
    return found


def run(prefix, case, fault, folder, cache) -> subprocess.CompletedProcess[str]:
    # each tensor an allocation of its own: what lies behind one is nobody's
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "XDG_CACHE_HOME": str(cache)}
    program = [sys.executable, "-m", "tests.lib.sanitized_child", case, fault, str(folder)]
    return subprocess.run([*prefix, *program], cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


def told(output: str) -> list[str]:
    """What the child printed."""
    return [line for line in output.splitlines() if not line.startswith("=====")]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Where cubins are kept from one process to the next, by content."""
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture(scope="module")
def unwatched(cache, tmp_path_factory):
    """What a case prints without a tool."""

    @functools.cache
    def of(case: str) -> list[str]:
        done = run([], case, "none", tmp_path_factory.mktemp("unwatched"), cache)
        assert done.returncode == 0, done.stderr
        return told(done.stdout)

    return of


def watch(tool, case, fault, folder, cache) -> tuple[subprocess.CompletedProcess[str], bool]:
    """The run, and whether the tool found nothing."""
    faults = "+".join(f for f in (NO_FAULT.get(tool), fault) if f) or "none"
    prefix = [find_sanitizer(), "--tool", tool, "--error-exitcode", "9", *TOOLS[tool]]
    done = run(prefix, case, faults, folder, cache)
    assert "SUMMARY: " in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
    clean = "SUMMARY: 0 " in done.stdout and done.returncode == 0
    if tool == "racecheck":
        assert clean == (not races_in(done.stdout))
        cubins = [functions_in(path, disassembler("nvdisasm")) for path in folder.glob("*.cubin")]
        races = unexplained(done.stdout, cubins)
        print(sorted(races))
        clean = not races
    return done, clean


@pytest.mark.parametrize(("tool", "case"), WATCHED)
def test_it_finds_nothing(tool, case, unwatched, cache, tmp_path):
    done, clean = watch(tool, case, "", tmp_path, cache)
    assert clean, done.stdout[:4000]
    assert told(done.stdout) == unwatched(case)


@pytest.mark.parametrize(("tool", "case", "fault"), PLANTED)
def test_it_finds_what_is_planted(tool, case, fault, cache, tmp_path):
    done, clean = watch(tool, case, fault, tmp_path, cache)
    assert not clean, done.stdout[-4000:]
