"""Gates on gfx942 objects: registers, LDS, residency, matrix units, scopes, fences, a budget; each seen red."""

from dataclasses import replace
from itertools import product

import pytest

from tests.gfx942 import budget
from tests.lib.gfx942 import clang
from tests.lib.gfx942.backends import HERE
from tests.lib.gfx942.gates import Gates, Needs, fences_of, gates_of, refused
from tests.lib.gfx942.litmus import BLOCKS, LITMUS, THREADS
from tests.lib.gfx942.triton_backend import KERNEL
from tests.lib.gfx942.triton_cases import ALL, CASES, FULL_OBJECTS, FULL_SIZE, MORE_SIZES, STANDS_FOR, compiled

FENCE = (
    "S_WAITCNT vmcnt(0)", "S_BARRIER",  # every wave drains its own, and all are here
    "BUFFER_WBL2 01", "S_WAITCNT vmcnt(0)", "GLOBAL_ATOMIC_ADD 00", "S_WAITCNT vmcnt(0)", "BUFFER_INV 01",
    "S_BARRIER",
)  # fmt: skip
FIRST = [(case, "") for case in CASES | FULL_SIZE]
VARIANTS = FIRST + [
    pytest.param(case, variant, marks=pytest.mark.slow)
    for case, variant in [*product(CASES, ("rules", "chunks")), *FULL_OBJECTS]
    if (case, variant) not in FIRST
]
SPILLED = {"qwen3-8b": 48}  # registers that LLVM keeps in accumulators or memory
SCRATCH = {  # bytes a lane that it keeps in memory
    ("qwen3-8b", ""): 8,
    ("qwen3-8b", "rules"): 148,
    ("qwen3-8b", "chunks"): 12,
    ("qwen3-8b", "rules+chunks"): 152,
}


def gates(case: str, variant: str = "") -> Gates:
    made = compiled(case, variant)
    return gates_of(made.code_object, KERNEL, made.lds, made.num_warps)


@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_the_object_fits_and_its_fences_are_whole(case, variant):
    """One block a CU at least, weights in wide loads alone; the protocol's fences and scopes the same in every size."""
    full = case not in CASES
    scratch, spilled = SCRATCH.get((case, variant), 0), SPILLED.get(case, 32)
    most = {"non_temporal": 60, "spilled": spilled, "scratch": scratch} if full else {}
    mfma = 8 if full else 2  # small cases take 16 keys a step (triton_cases.Case)
    needs = Needs(ALL[case].num_blocks, mfma=mfma, scoped_loads=14, scoped_stores=12, **most)
    assert refused(gates(case, variant), needs) == {}
    assert gates(case, variant).count("GLOBAL_ATOMIC_ADD") == 2 + ("chunks" in variant) * 2
    fences = fences_of(compiled(case, variant).code_object, KERNEL)
    invalidated = len(FENCE) - 1  # behind it there may be waits for loads of others
    assert {f[:invalidated] + f[-1:] for f in fences} == {FENCE}
    assert {step for f in fences for step in f[invalidated:-1]} <= {FENCE[0]}


@pytest.mark.parametrize(
    ("full", "variant"),
    [one if one == ("llama-3.2-1b", "") else pytest.param(*one, marks=pytest.mark.slow) for one in FULL_OBJECTS],
)
def test_what_does_not_depend_on_size_is_the_small_objects(full, variant):
    """Fences, atomics, forms of shared accesses, sleeps and what reads the clock: of the full size as of what runs."""
    assert protocol(full, variant) == protocol(STANDS_FOR[full], variant)


def protocol(case: str, variant: str) -> tuple:
    made, one = compiled(case, variant), gates(case, variant)
    names = ("BUFFER_WBL2", "BUFFER_INV", "GLOBAL_ATOMIC", "S_MEMREALTIME", "S_SLEEP")
    return (
        {fence[: len(FENCE) - 1] for fence in fences_of(made.code_object, KERNEL)},
        {name: one.count(name) for name in names},
        {(kind, *form) for kind, *form in one.scopes},
        one.write_backs_unawaited,
    )


def test_other_exchanges_are_another_protocol():
    """The comparison tells a Laneformer from a plain model, which has fewer exchanges."""
    assert protocol("laneformer", "") != protocol("llama", "")


def test_weights_come_in_wide_loads():
    one = gates("llama-3.2-1b")
    assert one.count("GLOBAL_LOAD_DWORDX4", "BUFFER_LOAD_DWORDX4") >= 100
    assert one.most_in_flight >= 12


@pytest.mark.parametrize("compiler", HERE)
@pytest.mark.parametrize("name", LITMUS)
def test_litmus_kernels_fit(name, compiler):
    one = gates_of(HERE[compiler]("litmus.hip"), name, 0, THREADS // 64)
    found = refused(one, Needs(BLOCKS))
    assert found.keys() <= {"scopes"}  # agent scope, sc1 alone, is theirs
    forms = {form for kind, *form in one.scopes if kind != "ATOMIC" for form in [tuple(form)]}
    shared = (1, 1, 0) if name.startswith("rank") else (0, 1, 0)
    assert shared in forms and forms <= {(0, 0, 0), shared}


# ---- each gate, seen red ----

STRICT = Needs(304, mfma=8, dot2=32, non_temporal=8, scoped_loads=1, scoped_stores=1)
PLANTED = {
    "SPILLS": {"spills", "scratch"},
    "SCRATCH": {"scratch"},
    "REGISTERS": {"registers", "residency"},
    "NON_TEMPORAL": {"non-temporal loads"},
    "NARROW": {"narrow loads"},
    "DOT2": {"dot2"},
    "MFMA": {"MFMA"},
    "SCOPES": {"scopes", "shared loads", "shared stores"},
    "LOADS": {"shared loads"},
    "STORES": {"shared stores"},
}


def planted(*flags: str, lds: int = 0, waves: int = 4) -> Gates:
    return gates_of(clang.code_object("planted.hip", *flags), "planted", lds, waves)


def test_a_kernel_without_a_fault_passes():
    assert refused(planted(), STRICT) == {}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_turns_its_gate_red(fault):
    waves = 8 if fault == "REGISTERS" else 4  # two of a SIMD, each with half of its registers
    assert refused(planted(f"-DPLANT_{fault}", waves=waves), STRICT).keys() == PLANTED[fault]


def test_too_much_lds_and_too_many_blocks_are_refused():
    one = planted(lds=40 << 10)
    assert refused(one, STRICT) == {}
    assert refused(one, replace(STRICT, blocks=305)).keys() == {"residency"}
    assert refused(planted(lds=65 << 10), STRICT).keys() == {"LDS", "residency"}


def test_a_fence_that_lost_a_step_differs(monkeypatch):
    """Of the Triton kernel's object, each of a fence's steps made an s_nop in turn."""
    code_object = compiled("llama").code_object
    address, code = code_object.code(KERNEL)
    for lost, words in {
        "write back": (0xE0A08000, 0xE0A00000),
        "invalidation": (0xE0A48000, 0xE0A40000),
        "barrier": (0xBF8A0000,),
    }.items():
        blind = bytearray(code)
        for at in range(0, len(code) - 3, 4):
            if int.from_bytes(code[at : at + 4], "little") in words:
                blind[at : at + 4] = (0xBF800000).to_bytes(4, "little")
                if lost != "barrier":
                    blind[at + 4 : at + 8] = (0xBF800000).to_bytes(4, "little")
        assert bytes(blind) != code, lost
        monkeypatch.setattr(type(code_object), "code", lambda *_, blind=blind: (address, bytes(blind)))
        try:
            assert set(fences_of(code_object, KERNEL)) != {FENCE}, lost
        except ValueError:
            assert lost == "barrier"  # there is none left to begin at
        monkeypatch.undo()


# ---- the budget ----


def test_the_budget_adds_up(capsys):
    """By hand: 4.2 TB/s for 1 us are 4.2 MB on their way, 13.8 KB a CU; what is asked of 304 CUs at 2.1 GHz."""
    assert budget.needed_bytes(1.0) == pytest.approx(13815.8, rel=1e-4)
    assert budget.issue_slots(1000.0) == pytest.approx(525_000)
    assert budget.main([]) == 0
    text = capsys.readouterr().out
    assert "llama-3.2-1b" in text and "Assumed" in text
    for latency in budget.LATENCIES:
        assert f"{latency:.1f} us" in text


@pytest.mark.slow
def test_other_models_are_within_the_budget(capsys):
    assert budget.main([*MORE_SIZES]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{name}: " in text for name in MORE_SIZES)


def test_a_model_that_has_no_object_is_refused(capsys):
    with pytest.raises(SystemExit):
        budget.main(["llama"])
    assert "no object of llama: have llama-3.2-1b" in capsys.readouterr().err


def test_what_is_beyond_the_budget_is_named(monkeypatch):
    """4.2 MB of weights take 1 us: 525 instructions of a wave; 13.8 KB are 4 waves' loads of 4."""
    one = replace(gates("llama"), instructions=300, most_in_flight=4, lds=0)
    assert budget.exceeded(one, 4_200_000, 1) == [f"bytes in flight at {latency} us" for latency in (1.5, 2.0)]
    assert "issue slots" in budget.exceeded(one, 4_200_000, 2)
    assert "LDS" in budget.exceeded(replace(one, lds=65 << 10), 4_200_000, 1)
    monkeypatch.setattr(budget, "BANDWIDTH", 4.2e13)
    assert budget.main([]) == 1
