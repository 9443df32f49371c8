"""The second engine: atheris, which keeps the cases that reach new code and changes them further.

    pip install atheris        (wheels for Linux and macOS)

It runs one target in a process of its own, for it ends its process, and instruments kog_triton and
jinja2. Half of the changes are ours, by structure, and half are libFuzzer's.
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from tests import ROOT

from .record import MEMORY_LIMIT, Record

LIMIT_S = 10  # of one case; libFuzzer counts in whole seconds


def fuzz(name: str, cases: int, seed: int) -> Record:
    """Run about `cases` cases of a target; the first fault ends the run."""
    if importlib.util.find_spec("atheris") is None:
        sys.exit("the atheris engine needs atheris: pip install atheris, or use --engine seeded")
    record, started = Record(name, seed, cases), time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz.guided", name, str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        options = [f"-runs={cases}", f"-seed={seed + 1}", f"-timeout={LIMIT_S}"]
        options += [f"-rss_limit_mb={MEMORY_LIMIT >> 20}", "-print_final_stats=1"]
        options += [f"-artifact_prefix={folder}/", "-max_len=65536", "-verbosity=1"]
        done = subprocess.run(
            [*command, *options, str(corpus)],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": folder},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    said = done.stderr + done.stdout
    stats = dict(re.findall(r"stat::(\w+):\s+(\d+)", said))
    record.cases = int(stats.get("number_of_executed_units", 0))
    record.peak_memory_mib = int(stats.get("peak_rss_mb", 0))
    record.slowest_s = float(stats.get("slowest_unit_time_sec", 0))
    record.seconds = round(time.monotonic() - started, 1)
    if done.returncode != 0:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        known = ("=== Uncaught", "==ERROR", "Traceback", "ALARM")
        at = next((i for i, line in enumerate(lines) if any(k in line for k in known)), -4)
        record.add_fault(f"exit {done.returncode}: " + " | ".join(lines[at:][:4])[:400], -1)
    return record


def _serve(name: str, seed: int, options: list[str]) -> None:
    """The process of one target; atheris ends it."""
    import atheris

    with atheris.instrument_imports(include=["kog_triton", "jinja2"], enable_loader_override=False):
        from .table import TARGETS

    target = TARGETS[name](Path(tempfile.mkdtemp()))
    corpus = Path(options[-1])
    for number, data in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(data)

    def change(data: bytes, max_size: int, number: int) -> bytes:
        draw = Random(f"{seed}:{number}")
        if draw.random() < 0.5:
            return atheris.Mutate(data, max_size)
        return target.damage(draw, data)[:max_size]

    def run(data: bytes) -> None:
        target.run(data)

    atheris.Setup([sys.argv[0], *options], run, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
