"""KCCL's collectives (hip/kccl.hip) as gfx942 machine code on several simulated GPUs: sums, waits that end, faults."""

import numpy as np
import pytest

from kog_triton.backends.cuda.layout.collectives import channel_words
from tests import ROOT
from tests.lib.gfx942.backends import CLANG, COMPILERS, FETCHED, INSTALLED, text_object
from tests.lib.gfx942.executor import PLAIN, WEAK, Buffer, Kernel, Launch
from tests.lib.gfx942.hip_collectives import (
    BLOCKS,
    LIMIT_NS,
    POLICY,
    RUNTIME,
    STEPS,
    Ranks,
    assert_told,
    compiled,
    lives,
    of_kccl,
    run,
    shown,
    wrong,
)
from tests.lib.gfx942.hip_gates import amiss
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.kccl_runs import COLLECTIVES, VECTORS, assert_right
from tests.lib.slow import some_always
from tests.lib.wheel_files import Absent

CASES = [(policy, ranks) for policy in POLICY for ranks in (2, 4, 8)]
ALWAYS = [(policy, ranks) for policy, ranks in CASES if ranks == 2] + [("PoisonWords", 4)]


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
        assert lives(mutant, policy), mutant.named()


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
