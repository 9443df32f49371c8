"""KCCL's headers compiled for gfx942: the collectives of hip/kccl.hip, run by several simulated GPUs."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kog_triton.backends.cuda.layout.collectives import (
    MOST_RANKS,
    POLICIES,
    REPORT_WORDS,
    channel_words,
)
from kog_triton.backends.cuda.peers import Comm
from tests.lib.gfx942.backends import CLANG, text_object
from tests.lib.gfx942.clang import HIP
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.executor import (
    PLAIN,
    SYSTEM,
    Buffer,
    Fault,
    Kernel,
    Launch,
    Memory,
    round_robin,
)
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.gfx942.litmus import EARLY, MAPS, MOST_STEPS
from tests.lib.gfx942.mutants import Mutant, mutants
from tests.lib.gfx942.places import chains
from tests.lib.kccl_runs import DELAY, VECTORS, Ended, assert_right

POLICY = {policy.name: policy for policy in POLICIES.values()}
THREADS, WAVE = 128, 64
LIMIT_NS = 2_000_000  # of the executor's clock, where a wait is to expire: 200,000 instructions
OWN = {
    "__syncthreads",
    "__syncthreads_and",
    "input",
}  # of the kernels, where KCCL is inlined into them
RUNTIME = HIP.parent / "hip_runtime"  # in the place of ROCm's header


class Argument(ctypes.Structure):
    """Of hip/kccl.hip's kernels."""

    _fields_ = (
        ("comm", Comm),
        *((n, ctypes.c_uint64) for n in ("found", "first", "last", "steps", "blocks")),
    )


@cache
def collectives(
    policy: str, ranks: int, includes: tuple[Path, ...] = INCLUDES, compiler: str = CLANG
) -> CodeObject:
    names = {"RANKS": ranks, "POLICY": policy, "DELAY": DELAY}
    defined = "".join(f"#define {name} {value}\n" for name, value in names.items())
    return text_object(defined + (HIP / "kccl.hip").read_text(), (*includes, RUNTIME), compiler)


def comms(words: np.ndarray, reports: np.ndarray, limit: int) -> list[Comm]:
    """Of each rank: words [ranks, words of one], reports [ranks, REPORT_WORDS]; limit in ns."""
    made = []
    for rank in range(len(words)):
        comm = Comm(limit=limit, ranks=len(words), rank=rank)
        for i, (w, r) in enumerate(zip(words, reports, strict=True)):
            comm.words[i], comm.reports[i] = w.ctypes.data, r.ctypes.data
        made.append(comm)
    return made


def run(
    kernel: Kernel, policy: str, ranks: int, blocks: int = 2, steps: int = 6, memory: Memory = PLAIN, seed: int = 0,
    limit: int = 1 << 40, absent: int = -1, xcc: Callable[[int], int] = round_robin, counts: np.ndarray | None = None,
) -> Ended:  # fmt: skip
    """`steps` uses in two launches, with nothing done to the words between, or in one if a wait expires there."""
    values = POLICY[policy].values * VECTORS
    width = ranks * values if kernel.name == "gather" else values + 1
    count = (
        channel_words(POLICY[policy], ranks, VECTORS, DELAY * (kernel.name == "delayed"))
        + 2 * MOST_RANKS
    )
    words = np.full((ranks, count), POLICY[policy].empty, np.uint32)
    words[:, -2 * MOST_RANKS :] = 0
    reports, found = (
        np.zeros((ranks, REPORT_WORDS), np.uint32),
        np.zeros((ranks, blocks, steps, width), np.float32),
    )
    shared = [Buffer(one, True, SYSTEM) for memory in (words, reports) for one in memory]
    for first, last in ((0, steps // 2), (steps // 2, steps)):
        launches = [
            Launch(
                [bytes(Argument(comm, found[rank].ctypes.data, first, last, steps, blocks))],
                (blocks, 1, 1), (THREADS, 1, 1), rank,
            )
            for rank, comm in enumerate(comms(words, reports, limit)) if rank != absent
        ]  # fmt: skip
        buffers = [*shared, *map(Buffer, found)]
        done = kernel.run(launches, buffers, memory, seed, xcc=xcc, steps=MOST_STEPS)
        if counts is not None:
            counts += done.executed
        if reports[:, 0].any():
            return Ended(1, reports.tolist(), found.ravel(), "")
    return Ended(0, [], found.ravel(), "")


def wrong(
    kernel: Kernel, policy: str, ranks: int, seed: int, counts: np.ndarray | None = None
) -> str:
    """ "" if a run is right, else what was wrong; every fourth run lacks a rank."""
    memory = Memory(True, EARLY[seed % 3], 0.02, 0.002, (1, 20, 60)[seed // 3 % 3])
    where: dict[str, Any] = {
        "memory": memory,
        "seed": seed,
        "xcc": MAPS[seed % len(MAPS)],
        "counts": counts,
    }
    absent = seed // 4 % ranks if seed % 4 == 3 else -1
    try:
        if absent >= 0:
            return reported(
                run(kernel, policy, ranks, limit=LIMIT_NS, absent=absent, **where),
                policy,
                ranks,
                absent,
            )
        assert_right(run(kernel, policy, ranks, **where), policy, kernel.name, ranks, 2, 6)
    except (Fault, AssertionError) as one:
        return f"{type(one).__name__}: {one}"
    return ""


def reported(ended: Ended, policy: str, ranks: int, absent: int) -> str:
    """What is wrong with the reports where one rank never came: all are to leave, and it is named."""
    told = [report for report in ended.reports if report[1]]
    marks = (POLICY[policy].empty, 0) if POLICY[policy].empty else (0, 1)
    right = all(
        (late, *marks) == (place // (4 * VECTORS) % ranks, *seen)
        for _, _, late, place, *seen, _, _ in told
    )
    right &= absent in {report[2] for report in told} and not ended.reports[absent][1]
    return (
        ""
        if right and all(report[0] == 1 for report in ended.reports)
        else f"reports {ended.reports}"
    )


def of_kccl(kernel: Kernel, policy: str, ranks: int) -> list[Mutant]:
    """Mutants of what runs of KCCL's own code, not of the kernel's that calls it."""
    counts = np.zeros(len(kernel.records), np.uint64)
    for seed in range(8):
        wrong(kernel, policy, ranks, seed, counts)
    places = chains(kernel.code_object, kernel.name)
    return [m for m in mutants(kernel) if counts[m.index] and not OWN.intersection(places[m.index])]
