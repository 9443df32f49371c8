"""Bounds on the Triton kernel's gfx942 objects: registers, LDS, residency, what a fence is made of, matrix units."""

import pytest

from tests.gfx942 import budget
from tests.lib.gfx942.gates import CUS, LDS_BYTES, fences_of, gates_of
from tests.lib.gfx942.triton_backend import KERNEL
from tests.lib.gfx942.triton_cases import CASES, FULL_SIZE, compiled

FENCE = (
    "S_WAITCNT vmcnt(0)", "S_BARRIER",  # every wave drains its own, and all are here
    "BUFFER_WBL2 01", "S_WAITCNT vmcnt(0)", "GLOBAL_ATOMIC_ADD 00", "S_WAITCNT vmcnt(0)", "BUFFER_INV 01",
    "S_BARRIER",
)  # fmt: skip
VARIANTS = [(case, "") for case in (CASES | FULL_SIZE)] + [
    pytest.param(case, variant, marks=pytest.mark.slow)
    for case in CASES
    for variant in ("rules", "chunks")
]


@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_the_object_fits_and_its_fences_are_whole(case, variant):
    """One block a CU at least, nothing in scratch; the protocol's fences the same in every size."""
    made = compiled(case, variant)
    gates = gates_of(made.code_object, KERNEL, made.lds, made.num_warps)
    assert gates.spilled == gates.scratch == 0
    assert gates.vgprs <= 512 and gates.lds <= LDS_BYTES
    assert gates.groups_per_cu >= 1
    assert (CASES | FULL_SIZE)[case].num_blocks <= CUS * gates.groups_per_cu
    assert gates.count("V_MFMA") >= 8
    assert gates.count("GLOBAL_ATOMIC_ADD") == 2 + ("chunks" in variant) * 2
    fences = fences_of(made.code_object, KERNEL)
    bare = {
        tuple(step for i, step in enumerate(f) if (i, step) != (len(f) - 2, FENCE[0]))
        for f in fences
    }
    assert bare == {FENCE}


def test_weights_come_in_wide_loads():
    made = compiled("llama-3.2-1b")
    gates = gates_of(made.code_object, KERNEL, made.lds, made.num_warps)
    assert gates.count("GLOBAL_LOAD_DWORDX4", "BUFFER_LOAD_DWORDX4") >= 100
    assert gates.most_in_flight >= 12


def test_the_budget_adds_up(capsys):
    """By hand: 4.2 TB/s for 1 us are 4.2 MB on their way, 13.8 KB a CU; what is asked of 304 CUs at 2.1 GHz."""
    assert budget.needed_bytes(1.0) == pytest.approx(13815.8, rel=1e-4)
    assert budget.issue_slots(1000.0) == pytest.approx(525_000)
    assert budget.main([]) == 0
    text = capsys.readouterr().out
    assert "llama-3.2-1b" in text and "Assumed" in text
    for latency in budget.LATENCIES:
        assert f"{latency:.1f} us" in text
