"""compute-sanitizer finds nothing in the CUDA monokernel, and does find what is planted there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
TESTS = Path(__file__).parents[1]
TIMEOUT_S = 100
KERNEL = "kog_decode"
OURS = ("--kernel-name", "kernel_substring=kog_")
# initcheck watches every kernel: torch's are what fills memory
TOOLS = {
    "memcheck": OURS,
    "racecheck": OURS,
    "synccheck": OURS,
    "initcheck": (),
}
# Who writes where racecheck reports a race between threads of a block, and why it is none.
ORDERED = {
    "store_volatile",  # flags between warps, words that are polled; no other data hangs on them
    "bulk_load",  # chunks of the ring: all lanes read, one arrives on the mbarrier the next copy waits for
    "end_step", "serve_seat",  # every thread writes the same value, and reads what it wrote itself
}  # fmt: skip


def find_sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit, on the PATH")
    return found


def run(prefix: list[str], fault: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # each tensor an allocation of its own: what lies behind one is nobody's
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "XDG_CACHE_HOME": str(folder)}
    program = [sys.executable, str(TESTS / "sanitized_child.py"), fault, str(folder)]
    return subprocess.run(
        [*prefix, *program], env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def told(output: str) -> list[str]:
    """What the child printed."""
    return [line for line in output.splitlines() if not line.startswith("=====")]


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory) -> list[str]:
    done = run([], "none", tmp_path_factory.mktemp("unwatched"))
    assert done.returncode == 0, done.stderr
    return told(done.stdout)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "planted"])
@pytest.mark.parametrize("tool", TOOLS)
def test_it_finds_nothing_but_what_is_planted(tool, fault, unwatched, tmp_path):
    prefix = [find_sanitizer(), "--tool", tool, "--error-exitcode", "9", *TOOLS[tool]]
    done = run(prefix, tool if fault else "none", tmp_path)
    assert "SUMMARY: " in done.stdout, done.stdout[-2000:]
    clean = "SUMMARY: 0 " in done.stdout and done.returncode == 0
    if tool == "racecheck":
        races = races_in(done.stdout)
        assert clean == (not races)
        unknown = [race for race in races if not race <= ORDERED]
        assert bool(unknown) == fault, unknown
    else:
        assert clean != fault, done.stdout[:4000]
    if not fault:
        assert told(done.stdout) == unwatched


def races_in(output: str) -> list[set[str]]:
    """The functions that write, race by race; without arguments and what stands before their names.

    Some stores are reported by the kernel's name alone, without a line: where a volatile load reads
    what they wrote, they are `store_volatile`.
    """
    races: list[set[str]] = []
    for report in output.split("Race reported between")[1:]:
        names: dict[str, set[str]] = {"Read": set(), "Write": set()}
        for kind, name in re.findall(r"(Read|Write) access at (.*)", report):
            plain = re.sub(r"[(+].*", "", re.sub(r"<[^>]*>", "", name))  # no template arguments
            names[kind].add(plain.split("::")[-1])
        if names["Read"] == {"load_volatile"}:
            names["Write"] = {"store_volatile" if w == KERNEL else w for w in names["Write"]}
        races.append(names["Write"])
    return races
