"""KCCL's collectives (hip/kccl.hip) as gfx942 machine code on several simulated GPUs, and mutants of them."""

import ctypes
from functools import cache
from typing import Any

import numpy as np

from kog_triton.backends.cuda.layout.collectives import POLICIES, REPORT_WORDS, channel_words
from kog_triton.backends.cuda.peers import Comm
from tests.lib.gfx942.backends import CLANG, text_object
from tests.lib.gfx942.clang import HIP
from tests.lib.gfx942.executor import SYSTEM, Buffer, Fault, Launch, Memory
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.gfx942.hip_mutants import why_of_wait
from tests.lib.gfx942.litmus import EARLY, MOST_STEPS, map_of
from tests.lib.gfx942.mutants import Mutant, caught, mutants
from tests.lib.gfx942.places import chains
from tests.lib.kccl_runs import DELAY, VECTORS, Ended, assert_right

POLICY = {policy.name: policy for policy in POLICIES.values()}
BLOCKS, STEPS, THREADS = 2, 6, 128
NEVER, LIMIT_NS = 1 << 40, 2_000_000  # of the executor's clock: 10 an instruction
RUNTIME = HIP.parent / "hip_runtime"  # in the place of ROCm's header
OWN = {"__syncthreads", "__syncthreads_and", "input"}  # no functions of KCCL's


class Argument(ctypes.Structure):
    """Of hip/kccl.hip."""

    _fields_ = (("comm", Comm), *((n, ctypes.c_uint64) for n in ("found", "first", "last", "steps")))


@cache
def compiled(policy, ranks, includes=INCLUDES, compiler=CLANG):
    names = f"#define POLICY {policy}\n#define RANKS {ranks}\n#define DELAY {DELAY}\n"
    return text_object(names + (HIP / "kccl.hip").read_text(), (*includes, RUNTIME), compiler)


class Ranks:
    """The memory of some ranks, which all see and only system scope may touch: uint32 [ranks, words], and reports."""

    def __init__(self, ranks, words, empty=0, limit=NEVER):
        self.words, self.reports = (
            np.full((ranks, words), empty, np.uint32),
            np.zeros((ranks, REPORT_WORDS), np.uint32),
        )
        self.buffers = [Buffer(one, True, SYSTEM) for one in (*self.words, *self.reports)]
        self.comms = [Comm(limit=limit, ranks=ranks, rank=rank) for rank in range(ranks)]
        for comm in self.comms:
            comm.words[:ranks] = [one.ctypes.data for one in self.words]
            comm.reports[:ranks] = [one.ctypes.data for one in self.reports]


def run(kernel, policy, ranks, limit=NEVER, absent=-1, counts=None, **where):
    """STEPS uses in two launches, with nothing done to the words between, or in one if a wait expires there."""
    one, sums = POLICY[policy], POLICY[policy].values * VECTORS
    count = channel_words(one, ranks, VECTORS, DELAY * (kernel.name == "delayed"))
    of_all = Ranks(ranks, count + 2 * ranks, one.empty, limit)
    of_all.words[:, count:] = 0
    width = ranks * sums if kernel.name == "gather" else sums + 1
    found = np.zeros((ranks, BLOCKS, STEPS, width), np.float32)
    for first in (0, STEPS // 2):
        launches = []
        for rank, comm in enumerate(of_all.comms):
            argument = Argument(comm, found[rank].ctypes.data, first, first + STEPS // 2, STEPS)
            launches += [Launch([bytes(argument)], (BLOCKS, 1, 1), (THREADS, 1, 1), rank)] * (rank != absent)
        buffers, most = [*of_all.buffers, *map(Buffer, found)], MOST_STEPS * ranks // 2
        done = kernel.run(launches, buffers, steps=most, **where)
        if counts is not None:
            counts += done.executed
        if of_all.reports[:, 0].any():
            return Ended(1, of_all.reports.tolist(), found.ravel(), "")
    return Ended(0, [], found.ravel(), "")


def assert_told(ended, policy, ranks, absent):
    """All are to leave; who has waited says for whose word, where one never came, and which mark it had."""
    marks = [POLICY[policy].empty, 0 if POLICY[policy].empty else 1]
    told = [report for report in ended.reports if report[1]]
    assert ended.code == 1 and all(report[0] == 1 for report in ended.reports), ended.reports
    assert absent in {report[2] for report in told} and not any(ended.reports[absent][1:]), ended.reports
    for _, _, late, place, *seen in told:
        assert (late, marks) == (place // (4 * VECTORS) % ranks, seen[:2]), ended.reports


def wrong(kernel, policy, ranks, seed, counts=None):
    """ "" if a run in adversarial memory is right, else what was wrong; every fourth run lacks a rank."""
    memory = Memory(True, EARLY[seed % 3], 0.02, 0.002, (1, 20, 60)[seed // 3 % 3])
    where: dict[str, Any] = {"memory": memory, "seed": seed, "xcc": map_of(seed), "counts": counts}
    absent = seed // 4 % ranks
    try:
        if seed % 4 == 3:
            assert_told(run(kernel, policy, ranks, LIMIT_NS, absent, **where), policy, ranks, absent)
        else:
            assert_right(run(kernel, policy, ranks, **where), policy, kernel.name, ranks, BLOCKS, STEPS)
    except (Fault, AssertionError) as one:
        return f"{type(one).__name__}: {one}"
    return ""


def of_kccl(kernel, policy):
    """Mutants of what two ranks run of KCCL's own functions, which are inlined into the kernel's."""
    counts = np.zeros(len(kernel.records), np.uint64)
    for seed in range(8):
        wrong(kernel, policy, 2, seed, counts)
    places = chains(kernel.code_object, kernel.name)
    return [m for m in mutants(kernel) if counts[m.index] and OWN.isdisjoint(places[m.index])]


def shown(mutant, policy, seeds):
    return caught(mutant.kernel, lambda kernel, seed: wrong(kernel, policy, 2, seed), seeds)


def lives(mutant: Mutant, policy: str, tries: int = 36, more: int = 240) -> str:
    """Why no run tells the mutant (`why_of_wait`); "caught" if one of `tries` does, or one of `more` where nothing
    says why; "" if neither."""
    if shown(mutant, policy, tries):
        return "caught"
    return why_of_wait(mutant).partition(":")[0] or "caught" * bool(shown(mutant, policy, more))
