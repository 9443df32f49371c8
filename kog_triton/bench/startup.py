"""`kog bench startup`: how long from nothing to a token, each time in a process of its own.

    import    Python starts, the kernel's compiler is begun, torch and this package are imported
    load      weights are read or made, packed, the backend is open
    first     the first token of the first request: compiles whatever was not compiled before
    second    the first token of the next request
    total     from nothing to the first token
    compiled  from nothing to all that the model needs for one and for eight requests, prompts included

The first round compiles: its compilers find nothing kept. The later ones find what it has kept. Files of the
model may lie in the page cache of either.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from kog_triton.bench.record import make_row
from kog_triton.bench.task import Say
from kog_triton.errors import RunError

PHASES = ("import_s", "load_s", "first_token_s", "second_token_s", "total_s", "compiled_s")
TIMEOUT_S = 900
RELAY_S = 5  # for the last lines of a process that has ended, should another hold its stderr
# Where our cubins and Triton's kernels are kept; what NVRTC keeps itself (CUDA 12.9 on) is left aside.
CACHES = ("XDG_CACHE_HOME", "TRITON_CACHE_DIR")


def start_rounds(name: str, asked: dict[str, Any], rounds: int, say: Say) -> dict[str, Any]:
    """A row of `rounds` starts of one backend; `asked` are the other arguments of `one_start`."""
    starts = []
    with empty_caches() as environment:
        for n in range(rounds):
            say(f"start {n + 1} of {rounds}: {name}")
            starts.append(_start(asked | {"backend": name}, environment, say))
    row = make_row(name, "backend", "timed", "")
    row["load_s"] = median(s["load_s"] for s in starts)
    row["startup"] = {phase: [s[phase] for s in starts] for phase in PHASES}
    return row


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """The environment of processes whose compilers find only what these processes have kept."""
    from huggingface_hub.constants import HF_HOME  # would move with the first of them

    with tempfile.TemporaryDirectory() as folder:
        moved = {name: str(Path(folder, name.lower())) for name in CACHES}
        yield os.environ | {"HF_HOME": HF_HOME, "CUDA_CACHE_DISABLE": "1"} | moved


@contextmanager
def _relayed(say: Say) -> Iterator[tuple[int, list[str]]]:
    """A file descriptor for the stderr of a process, whose lines are said as they come, and those lines."""
    reading, writing = os.pipe()
    lines: list[str] = []

    def relay() -> None:
        with os.fdopen(reading, encoding="utf-8", errors="replace") as stderr:
            for line in filter(None, map(str.rstrip, stderr)):
                lines.append(line)
                say(line)

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    try:
        yield writing, lines
    finally:
        os.close(writing)
        thread.join(RELAY_S)


def _start(asked: dict[str, Any], environment: dict[str, str], say: Say) -> dict[str, float]:
    given = json.dumps(asked | {"started": time.time()})
    program = [sys.executable, "-m", "kog_triton.bench.one_start", given]
    try:
        with _relayed(say) as (stderr, lines):
            done = subprocess.run(
                program, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=TIMEOUT_S
            )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"a start took more than {TIMEOUT_S} s") from error
    if done.returncode:
        said = lines[-1] if lines else "no message"
        raise RunError(f"a start failed: {said.removeprefix('error: ')}")
    phases: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return phases
