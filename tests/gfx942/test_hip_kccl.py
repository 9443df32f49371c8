"""KCCL's collectives (hip/kccl.hip) as gfx942 machine code on several simulated GPUs: sums, waits that end, faults."""

import ctypes
from functools import cache
from typing import Any

import numpy as np
import pytest

from kog_triton.backends.cuda.layout.collectives import POLICIES, REPORT_WORDS, channel_words
from kog_triton.backends.cuda.peers import Comm
from tests import ROOT
from tests.lib.gfx942.backends import CLANG, COMPILERS, FETCHED, INSTALLED, text_object
from tests.lib.gfx942.clang import HIP
from tests.lib.gfx942.executor import PLAIN, SYSTEM, WEAK, Buffer, Fault, Kernel, Launch, Memory
from tests.lib.gfx942.hip_gates import amiss
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.gfx942.hip_mutants import kept, needed
from tests.lib.gfx942.litmus import EARLY, MAPS, MOST_STEPS
from tests.lib.gfx942.mutants import caught, mutants
from tests.lib.gfx942.places import chains
from tests.lib.kccl_runs import COLLECTIVES, DELAY, VECTORS, Ended, assert_right
from tests.lib.slow import some_always
from tests.lib.wheel_files import Absent

POLICY = {policy.name: policy for policy in POLICIES.values()}
BLOCKS, STEPS, THREADS = 2, 6, 128
NEVER, LIMIT_NS = 1 << 40, 2_000_000  # of the executor's clock: 10 an instruction
RUNTIME = HIP.parent / "hip_runtime"  # in the place of ROCm's header
OWN = {"__syncthreads", "__syncthreads_and", "input"}  # no functions of KCCL's
CASES = [(policy, ranks) for policy in POLICY for ranks in (2, 4, 8)]
ALWAYS = [(policy, ranks) for policy, ranks in CASES if ranks == 2] + [("PoisonWords", 4)]


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
    where: dict[str, Any] = {"memory": memory, "seed": seed, "xcc": MAPS[seed % len(MAPS)], "counts": counts}
    absent = seed // 4 % ranks
    try:
        if seed % 4 == 3:
            assert_told(run(kernel, policy, ranks, LIMIT_NS, absent, **where), policy, ranks, absent)
        else:
            assert_right(run(kernel, policy, ranks, **where), policy, kernel.name, ranks, BLOCKS, STEPS)
    except (Fault, AssertionError) as one:
        return f"{type(one).__name__}: {one}"
    return ""


def seen_in(kernel, policy, ranks, seeds):
    return [found for seed in range(seeds) if (found := wrong(kernel, policy, ranks, seed))]


@pytest.mark.parametrize("what", COLLECTIVES)
@pytest.mark.parametrize(("policy", "ranks"), some_always(CASES, *ALWAYS))
def test_every_block_finds_the_sums_in_rank_order(policy, ranks, what):
    """In both memories, and no register is touched too early on any way through the code."""
    kernel = Kernel(compiled(policy, ranks), what)
    assert amiss(kernel.code_object, what) == []
    assert_right(run(kernel, policy, ranks), policy, what, ranks, BLOCKS, STEPS)
    assert seen_in(kernel, policy, ranks, 4) == []


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("policy", POLICY)
def test_many_seeds(policy, compiler):
    for ranks, what in [(2, what) for what in COLLECTIVES] + [(4, "reduce"), (4, "chosen")]:
        try:
            kernel = Kernel(compiled(policy, ranks, compiler=compiler), what)
        except Absent as absent:
            pytest.skip(str(absent))
        assert amiss(kernel.code_object, what) == []
        assert seen_in(kernel, policy, ranks, 12 if compiler in FETCHED else 72) == []


@pytest.mark.parametrize("policy", POLICY)
def test_ranks_leave_when_one_is_absent(policy):
    kernel = Kernel(compiled(policy, 2), "reduce")
    ended = run(kernel, policy, 2, LIMIT_NS, absent=1)
    assert_told(ended, policy, 2, 1)
    assert ended.reports[0][:4] == [1, 1, 1, 4 * VECTORS]


# ---- faults ----


def of_kccl(kernel, policy):
    """Mutants of what two ranks run of KCCL's own functions, which are inlined into the kernel's."""
    counts = np.zeros(len(kernel.records), np.uint64)
    for seed in range(8):
        wrong(kernel, policy, 2, seed, counts)
    places = chains(kernel.code_object, kernel.name)
    return [m for m in mutants(kernel) if counts[m.index] and OWN.isdisjoint(places[m.index])]


def shown(mutant, policy, seeds):
    return caught(mutant.kernel, lambda kernel, seed: wrong(kernel, policy, 2, seed), seeds)


@pytest.mark.parametrize("policy", some_always(POLICY, "EpochPairs"))
def test_every_narrower_scope_is_seen(policy):
    made = [m for m in of_kccl(Kernel(compiled(policy, 2), "chosen"), policy) if "narrower" in m.what]
    assert len(made) >= 12  # of vectors, of the number and of reports
    for mutant in made:
        assert "scope" in shown(mutant, policy, 8), mutant.named()


@pytest.mark.slow
@pytest.mark.parametrize("what", COLLECTIVES)
@pytest.mark.parametrize("policy", POLICY)
def test_every_mutant_is_caught_or_a_wait_of_another_way(policy, what):
    """Of a wait that lives: a register needs it on other ways than the runs take, or on none."""
    made = of_kccl(Kernel(compiled(policy, 2), what), policy)
    assert len(made) >= 50
    for mutant in made:
        if not shown(mutant, policy, 36):
            argued = " wait for " in mutant.what and (needed(mutant) or not kept(mutant))
            assert argued or shown(mutant, policy, 240), mutant.named()


FAULTS = {
    "16 bytes not whole": ("kWholeWords = 2;", "kWholeWords = 4;", "PoisonWords", "reduce", CLANG),
    "no drain": ("s_waitcnt vmcnt(0)", "", "PoisonWords", "reduce", CLANG),
    "one thread's word for all": ('asm("" : "+v"(p));', "", "EpochPairs", "chosen", *INSTALLED),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name, tmp_path):
    before, after, policy, what, compiler = FAULTS[name]
    text = (INCLUDES[0] / "kccl/ptx.h").read_text()
    assert text.count(before) == 1
    (tmp_path / "kccl").mkdir()
    (tmp_path / "kccl/ptx.h").write_text(text.replace(before, after))
    planted = Kernel(compiled(policy, 2, (tmp_path, *INCLUDES), compiler), what)
    assert any(wrong(planted, policy, 2, seed) for seed in range(24))


@pytest.mark.parametrize("memory", [PLAIN, WEAK], ids=["plain", "adversarial"])
def test_the_example_adds_up(memory):
    """Its kernel as CUDA's example has it, but of 12 steps, launched twice."""
    text = (ROOT / "backends/cuda/kccl_example.cu").read_text().split("#ifndef __CUDACC_RTC__")[0]
    text = text.replace("kSteps = 1000", "kSteps = 12")
    kernel = Kernel(text_object(text, (*INCLUDES, RUNTIME)), "add_up")
    assert amiss(kernel.code_object, "add_up") == []
    of_all = Ranks(2, channel_words(POLICY["PhaseWords"], 2, 256))
    for epoch in (0, 12):
        out = np.zeros((2, 256, 4), np.float32)
        each = enumerate(of_all.comms)
        launches = [Launch([bytes(c), epoch, out[r].ctypes.data], (1, 1, 1), (256, 1, 1), r) for r, c in each]
        kernel.run(launches, [*of_all.buffers, *map(Buffer, out)], memory, seed=1)
        assert (out == [[0.5, thread, 1, 2] for thread in range(256)]).all() and not of_all.reports.any()
