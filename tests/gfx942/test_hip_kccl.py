"""KCCL's collectives as gfx942 machine code on several simulated GPUs: values, waits that end, faults that are seen."""

import numpy as np
import pytest

from tests import ROOT
from tests.lib.gfx942.backends import COMPILERS, FETCHED, text_object
from tests.lib.gfx942.executor import PLAIN, SYSTEM, WEAK, Buffer, Kernel, Launch
from tests.lib.gfx942.hip_gates import amiss
from tests.lib.gfx942.hip_kccl import (
    LIMIT_NS,
    POLICY,
    REPORT_WORDS,
    RUNTIME,
    collectives,
    comms,
    of_kccl,
    run,
    wrong,
)
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.gfx942.hip_mutants import kept, needed
from tests.lib.gfx942.mutants import caught
from tests.lib.kccl_runs import COLLECTIVES, VECTORS, assert_right
from tests.lib.slow import some_always
from tests.lib.wheel_files import Absent

RANKS = some_always(
    [(policy, ranks) for policy in POLICY for ranks in (2, 4, 8)],
    *((policy, 2) for policy in POLICY),
    ("PoisonWords", 4),
)


def seen_in(kernel, policy, ranks, seeds):
    return [found for seed in range(seeds) if (found := wrong(kernel, policy, ranks, seed))]


@pytest.mark.parametrize("what", COLLECTIVES)
@pytest.mark.parametrize(("policy", "ranks"), RANKS)
def test_every_block_finds_the_sums_in_rank_order(policy, ranks, what):
    """In both memories; of four runs in an adversarial one, one lacks a rank."""
    kernel = Kernel(collectives(policy, ranks), what)
    assert amiss(kernel.code_object, what) == []
    assert_right(run(kernel, policy, ranks), policy, what, ranks, 2, 6)
    assert seen_in(kernel, policy, ranks, 4) == []


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("policy", POLICY)
def test_many_seeds(policy, compiler):
    """Those of clang-19 on 4 GPUs, too."""
    try:
        made = {ranks: collectives(policy, ranks, compiler=compiler) for ranks in (2, 4)}
    except Absent as absent:
        pytest.skip(str(absent))
    for ranks, what in [(2, what) for what in COLLECTIVES] + [(4, "reduce"), (4, "chosen")]:
        kernel = Kernel(made[ranks], what)
        assert amiss(made[ranks], what) == []
        assert seen_in(kernel, policy, ranks, 12 if compiler in FETCHED else 72) == []


@pytest.mark.parametrize("policy", POLICY)
def test_ranks_leave_when_one_is_absent(policy):
    """Each says whose word it waited for, and which mark it had; the absent one is told to leave as well."""
    kernel, empty = Kernel(collectives(policy, 2), "reduce"), POLICY[policy].empty
    (told, other) = run(kernel, policy, 2, limit=LIMIT_NS, absent=1).reports
    assert told == [1, 1, 1, 4 * VECTORS, empty, 0 if empty else 1, 0, 0]
    assert other == [1] + [0] * (REPORT_WORDS - 1)


@pytest.mark.parametrize("policy", some_always(POLICY, "EpochPairs"))
def test_every_narrower_scope_is_seen(policy):
    kernel = Kernel(collectives(policy, 2), "chosen")
    made = [m for m in of_kccl(kernel, policy, 2) if "narrower" in m.what]
    assert len(made) >= 12  # loads and stores of vectors, of the number and of the reports
    for mutant in made:
        assert "scope" in caught(mutant.kernel, lambda k, seed: wrong(k, policy, 2, seed), 8), (
            mutant.named()
        )


FAULTS = {
    "16 bytes that are taken for whole": ("kWholeWords = 2;", "kWholeWords = 4;"),
    "emptied without a drain": ("s_waitcnt vmcnt(0)", ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name, tmp_path):
    (before, after), text = FAULTS[name], (INCLUDES[0] / "kccl/ptx.h").read_text()
    assert text.count(before) == 1
    (tmp_path / "kccl").mkdir()
    (tmp_path / "kccl/ptx.h").write_text(text.replace(before, after))
    planted = Kernel(collectives("PoisonWords", 2, (tmp_path, *INCLUDES)), "reduce")
    assert any(wrong(planted, "PoisonWords", 2, seed) for seed in range(24))


@pytest.mark.slow
@pytest.mark.parametrize("what", COLLECTIVES)
@pytest.mark.parametrize("policy", POLICY)
def test_every_mutant_is_caught_or_a_wait_of_another_way(policy, what):
    """Of a wait that lives: on other ways than the runs took a register needs it, or none does."""
    kernel = Kernel(collectives(policy, 2), what)
    made = of_kccl(kernel, policy, 2)
    assert len(made) >= 50
    for mutant in made:
        if caught(mutant.kernel, lambda k, seed: wrong(k, policy, 2, seed), 36):
            continue
        if " wait for " in mutant.what and (needed(mutant) or not kept(mutant)):
            continue
        assert caught(mutant.kernel, lambda k, seed: wrong(k, policy, 2, seed), 240), mutant.named()


@pytest.mark.parametrize("memory", [PLAIN, WEAK], ids=["plain", "adversarial"])
def test_the_example_adds_up(memory):
    """Its kernel as it stands in CUDA's example, of fewer steps, launched twice."""
    text = (ROOT / "backends/cuda/kccl_example.cu").read_text().split("#ifndef __CUDACC_RTC__")[0]
    steps, text = 12, text.replace("kSteps = 1000", "kSteps = 12")
    kernel = Kernel(text_object(text, (*INCLUDES, RUNTIME)), "add_up")
    assert amiss(kernel.code_object, "add_up") == []
    words, reports = (
        np.zeros((2, 2 * 2 * 256 * 4), np.uint32),
        np.zeros((2, REPORT_WORDS), np.uint32),
    )
    shared = [Buffer(one, True, SYSTEM) for one in (*words, *reports)]
    right = np.stack([np.full(256, 0.5), np.arange(256), np.full(256, 1), np.full(256, 2)], 1)
    for epoch in (0, steps):
        out = np.zeros((2, 256, 4), np.float32)
        each = enumerate(comms(words, reports, 1 << 40))
        launches = [
            Launch([bytes(c), epoch, out[r].ctypes.data], (1, 1, 1), (256, 1, 1), r)
            for r, c in each
        ]
        kernel.run(launches, [*shared, *map(Buffer, out)], memory, seed=1)
        assert (out == right).all() and not reports.any()
