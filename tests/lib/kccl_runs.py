"""KCCL's own headers on a CPU: a thread for every block of every rank, memory as weak as promised, and an oracle.

The sums are calculated here by numpy, in rank order, from the inputs that cuda_host/kccl.cpp makes too.
"""

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kog_triton.schedule import wire
from tests.lib.compiled import made_once, version_of
from tests.lib.cuda_threads import JUDGED, RACE, judged_run
from tests.lib.cuda_walk import HERE, INCLUDE

POLICIES = {"PhaseWords": 4, "EpochPairs": 2, "PoisonWords": 4}  # and values of a vector
VECTORS, DELAY = 5, 2
COLLECTIVES = ("reduce", "delayed", "gather", "chosen")
NAN = np.uint32(0xFFFFFFFF).view(np.float32)
FLAGS = (
    *("-std=c++20", "-O1", "-ffp-contract=off", "-pthread"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
)


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code, a report of each rank if a block left, what each block found, what the judge said."""

    code: int
    reports: list[list[int]]
    found: np.ndarray  # [ranks, blocks, steps, values]
    judged: str


def build(policy: str, ranks: int, judged: bool = False, include: Path = INCLUDE) -> Path:
    source = HERE / "kccl.cpp"
    flags = (*FLAGS, f"-DRANKS={ranks}", f"-DPOLICY={policy}", f"-DDELAY={DELAY}")
    flags += ("-g", *JUDGED) if judged else ()
    headers = [*(HERE / "kccl").glob("*.h"), *(include / "kccl").glob("*.h")]
    parts = [version_of("g++"), " ".join(flags).encode(), source.read_bytes()]

    def make(draft: Path) -> None:
        command = ["g++", *flags, f"-I{HERE}", f"-I{include}", str(source), "-o", str(draft)]
        subprocess.run(command, check=True)

    return made_once([*parts, *(path.read_bytes() for path in sorted(headers))], make)


def run(program: Path, what: str, blocks=2, steps=40, seed=1, limit_ms=20_000, absent=-1) -> Ended:
    with tempfile.NamedTemporaryFile() as file:
        numbers = map(str, (blocks, steps, seed, limit_ms, absent))
        command = [str(program), what, *numbers, file.name]
        done = judged_run(command)
        if "unexpected memory mapping" in done.stderr:  # addresses too random for the judge
            done = judged_run(["setarch", "-R", *command])
        assert done.returncode in (0, 1, RACE), done.stderr
        reports = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
        found = np.fromfile(file.name, np.float32)
    return Ended(done.returncode, reports, found, done.stderr)


def plant(folder: Path, header: str, before: str, after: str) -> Path:
    """A new include folder in which one text of a KCCL header is another; `before` stands there once."""
    include = folder / "include"
    shutil.copytree(INCLUDE / "kccl", include / "kccl")
    path = include / "kccl" / header
    text = path.read_text()
    assert text.count(before) == 1, f"{header}: {before!r} stands there {text.count(before)}x"
    path.write_text(text.replace(before, after))
    return include


def inputs(ranks: int, step: int, before: np.ndarray) -> np.ndarray:
    """[ranks, values of a step]: noise, a NaN here and there, and a part of what came out a step before."""
    rank, i = np.arange(ranks, dtype=np.uint32)[:, None], np.arange(len(before), dtype=np.uint32)
    h = rank * np.uint32(2654435761) + np.uint32(step) * np.uint32(40503) + i * np.uint32(69069)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x45D9F3B)
    h ^= h >> np.uint32(16)
    v = h.view(np.int32).astype(np.float32) * np.float32(2.0**-20)
    finite = np.isfinite(before)
    v = np.where(finite, v + np.float32(2.0**-5) * np.where(finite, before, 0), v)
    return np.where(h % 61 == 0, NAN, v).astype(np.float32)


def sent(policy: str, values: np.ndarray) -> np.ndarray:
    """Values as their readers find them."""
    if policy == "PhaseWords":
        return wire.unpack_f32(wire.pack_f32(values, 0))
    return values


def expected(policy: str, what: str, ranks: int, steps: int) -> np.ndarray:
    """[steps, values]: what each block of each rank finds."""
    count = VECTORS * POLICIES[policy]
    out, sums, before = [], [], np.zeros(count, np.float32)
    for step in range(steps):
        rows = sent(policy, inputs(ranks, step, before if step else np.zeros_like(before)))
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        sums.append(total)
        if what == "gather":
            out.append(rows.ravel())
            before = rows[0]
            continue
        chosen = 1000 * (step % ranks) + step if what == "chosen" else 0
        late = sums[step - DELAY] if step >= DELAY else np.zeros_like(total)
        before = late if what == "delayed" else total
        out.append(np.append(before, np.float32(chosen)))
    return np.array(out)


def assert_right(ended: Ended, policy: str, what: str, ranks: int, blocks: int, steps: int) -> None:
    """Every block of every rank found the same bits, NaNs apart."""
    assert ended.code == 0, (ended.reports, ended.judged)
    want = expected(policy, what, ranks, steps)
    found = ended.found.reshape(ranks, blocks, *want.shape)
    assert np.isnan(want).any() and np.isfinite(want).mean() > 0.5
    same = (found.view(np.uint32) == want.view(np.uint32)) | (np.isnan(found) & np.isnan(want))
    assert same.all(), f"{(~same).sum()} of {same.size} values differ"
