"""Scope bits on every shared access of the Triton kernel's objects of full size: each access by the argument behind it.

What runs, runs in the executor (test_triton_requests.py); these objects are too large for that, so a walk over their
code says what each access touches (addresses.py), and what it says of the small objects is compared with what those
touched as they ran.
"""

import os
from collections import Counter
from dataclasses import replace

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: Triton compiles for that", allow_module_level=True)

from tests.lib.gfx942 import clang
from tests.lib.gfx942.addresses import CONSTANTS, SOURCES, accesses, values_of, written_by
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.decode import instructions, name_of
from tests.lib.gfx942.executor import Memory
from tests.lib.gfx942.gates import gates_of
from tests.lib.gfx942.lanes import EXEC, Untraced
from tests.lib.gfx942.litmus import LITMUS
from tests.lib.gfx942.requests import ASKED
from tests.lib.gfx942.scopes import CLASS_OF, KERNEL, NAMES, SHARED, accesses_of, counted, wrong
from tests.lib.gfx942.triton_backend import Conditions, ExecutedBackend, decoded, serve
from tests.lib.gfx942.triton_cases import CASES, FULL_OBJECTS, compiled

FIRST, *REST = FULL_OBJECTS
OBJECTS = [FIRST, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)]
MEMORY_BYTES = 8  # of a vector memory instruction
SAME_MEMORY = {"wide": "words", "half_weights": "weights", "half_embed": "embed"}


def first_object() -> CodeObject:
    return compiled(*FIRST).code_object


def shared(code_object: CodeObject) -> list:
    return [one for one in accesses_of(code_object) if CLASS_OF[min(one.arguments)] in SHARED]


@pytest.mark.parametrize(("case", "variant"), OBJECTS)
def test_every_access_is_known_and_every_shared_one_has_its_scope(case, variant):
    made = compiled(case, variant)
    found = accesses_of(made.code_object)
    assert wrong(found) == []
    counts = gates_of(made.code_object, KERNEL, made.lds, made.num_warps).counts
    memory = ("GLOBAL_", "BUFFER_LOAD", "BUFFER_STORE", "S_LOAD")
    assert len(found) == sum(n for name, n in counts.items() if name.startswith(memory))
    by_class = counted(found)
    assert by_class["words: LOAD sc0 sc1"] >= 14 and by_class["words: STORE sc0 sc1"] >= 12
    assert by_class["host: LOAD sc0 sc1"] >= 1 and by_class["host: STORE sc0 sc1"] >= 2
    assert by_class["model: LOAD sc0 nt"] >= 60 and by_class["fences: ATOMIC"] >= 2


# ---- seen red ----


def without(code: bytes, at: int, bit: str) -> bytes:
    """Machine code with a bit of the memory instruction at a byte cleared."""
    ((_, inst),) = instructions(code[at : at + MEMORY_BYTES])
    mask = 1 << getattr(type(inst), bit).lo
    raw = int.from_bytes(code[at : at + MEMORY_BYTES], "little")
    assert raw & mask
    return code[:at] + (raw ^ mask).to_bytes(MEMORY_BYTES, "little") + code[at + MEMORY_BYTES :]


@pytest.mark.parametrize("bit", ["sc0", "sc1"])
def test_a_bit_that_a_shared_access_lost_is_named(bit):
    """Of each shared access in turn: without sc1 none of them passes, without sc0 those of the host do not."""
    code_object, tried = first_object(), set()
    code = code_object.code(KERNEL)[1]
    for one in shared(code_object):
        ((_, inst),) = instructions(without(code, one.at, bit)[one.at : one.at + MEMORY_BYTES])
        blind = replace(one, form=(inst.sc0, inst.sc1, inst.nt))
        kind = CLASS_OF[min(one.arguments)]
        said = [f"{one.name} at {one.at:#x}: {one.kind} of {min(one.arguments)} with sc0, sc1, nt {blind.form}"]
        assert wrong([blind]) == ([] if (kind, bit) == ("words", "sc0") else said)
        tried.add((kind, one.kind))
    assert tried == {(kind, how) for kind in SHARED for how in ("LOAD", "STORE")}


def patched(monkeypatch, code_object: CodeObject, code: bytes) -> list:
    address, _ = code_object.code(KERNEL)
    with monkeypatch.context() as m:
        m.setattr(type(code_object), "code", lambda *_: (address, code))
        return accesses(code_object, KERNEL, NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("bit", ["sc0", "sc1"])
def test_the_whole_walk_over_code_that_lost_a_bit(bit, monkeypatch):
    code_object = first_object()
    code = code_object.code(KERNEL)[1]
    kinds = {(CLASS_OF[min(one.arguments)], one.kind): one for one in shared(code_object)}
    for (kind, _), one in kinds.items():
        said = wrong(patched(monkeypatch, code_object, without(code, one.at, bit)))
        assert len(said) == (0 if (kind, bit) == ("words", "sc0") else 1)
        assert all(f"at {one.at:#x}:" in line for line in said)


@pytest.mark.slow
def test_a_pointer_from_elsewhere_is_named(monkeypatch):
    """Each scalar load of arguments made one from another place: whatever used those pointers is no longer known."""
    code_object = first_object()
    code = code_object.code(KERNEL)[1]
    loads = [(at, inst) for at, inst in instructions(code) if inst.op.name == "S_LOAD_DWORDX8"]
    for at, inst in loads[1:]:  # the first is firmware's
        raw = int.from_bytes(code[at : at + 8], "little") & ~(63 << type(inst).sbase.lo)
        raw |= 10 << type(inst).sbase.lo  # s[20:21], of which nothing is known
        blind = code[:at] + raw.to_bytes(8, "little") + code[at + 8 :]
        said = wrong(patched(monkeypatch, code_object, blind))
        assert len(said) >= 2 and all("nothing is known" in line for line in said)


def test_a_store_to_the_weights_and_a_scalar_load_of_words_are_named():
    one = next(one for one in accesses_of(first_object()) if one.arguments == {"weights"})
    assert wrong([one]) == []
    assert len(wrong([replace(one, name="GLOBAL_STORE_DWORD")])) == 1
    scalar = replace(one, name="S_LOAD_DWORD", form=(0, 0, 0))
    assert wrong([scalar]) == []
    for name in ("words", "kv", "states", "scratch"):
        assert len(wrong([replace(scalar, arguments=frozenset({name}))])) == 1
    both = replace(one, arguments=frozenset({"weights", "words"}))
    assert len(wrong([both])) == 1


# ---- the walk itself ----

LOADED = {
    "straight": {"words"},
    "from_memory": set(),
    "through_lds": set(),
    "chosen": {"words", "own"},
    "offset_by": {"words", "own"},
    "masked": {"words", "own"},
    "left_early": {"words", "own"},
    "otherwise": {"words", "own"},
    "spilled": {"words"},
    "spilled_by_some": {"words", "own"},
    "never_spilled": set(),
    "jumped_over": {"words"},
    "jumped_back": {"own"},
}
REFUSED = {
    "generic": "FLAT_LOAD_DWORD",
    "unknown_mask": "EXEC is widened by unknown lanes",
    "spilled_at_an_index": "SCRATCH_STORE_DWORDX2 of more than a constant offset",
    "jumped_by_a_register": "S_SETPC_B64 at .* to an unknown place",
    "jumped_into": "a branch into the far jump",
}


@pytest.mark.parametrize("name", LOADED)
def test_pointers_on_their_ways(name):
    """Out of memory or LDS: not known. By a choice, by lanes that were off, on both sides of a condition: both."""
    *_, load, store = accesses(clang.code_object("pointers.hip"), name, ("words", "own"))
    assert (load.name, load.arguments) == ("GLOBAL_LOAD_DWORD", LOADED[name])
    assert (store.name, store.arguments) == ("GLOBAL_STORE_DWORD", {"own"})


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_walk_does_not_follow_is_refused_by_name(name):
    with pytest.raises(Untraced, match=REFUSED[name]):
        accesses(clang.code_object("pointers.hip"), name, ("words", "own"))


@pytest.mark.parametrize("name", LITMUS)
def test_far_jumps_lead_where_branches_do(name):
    """LLVM told that a branch reaches 8 instructions only: of other jumps, what the walk says is the same."""
    near, far = (clang.code_object("litmus.hip", *flags) for flags in ((), ("-mllvm", "-amdgpu-s-branch-bits=4")))
    kinds = [arg[".value_kind"] for arg in near.kernels[name][".args"]]
    names = [str(k) for k, kind in enumerate(kinds) if not kind.startswith("hidden_")]
    jumps = [name_of(inst) for _, inst in instructions(far.code(name)[1])].count("S_SETPC_B64")
    assert jumps >= 2
    said = [Counter((one.name, one.arguments, one.form) for one in accesses(made, name, names)) for made in (near, far)]
    assert said[0] == said[1]
    # Where other GPUs' memory lies is read from a table, which no argument of the kernel points into.
    assert all(arguments for _, arguments, _ in said[0]) or name.startswith("rank_")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["rules", "chunks"])
def test_operands_are_those_that_the_executor_decodes(variant):
    """Of every instruction that moves values: what the walk takes them to be made of, and where it puts them."""
    kernel, seen = decoded("llama", variant), set()
    _, code = kernel.code_object.code(KERNEL)
    for record, (_, inst) in zip(kernel.records, instructions(code), strict=True):
        name = name_of(inst)
        if name.startswith(("S_", "V_")) and not name.startswith(("S_LOAD", "V_CMP", "V_MFMA", "V_READLANE")):
            carry = ("CNDMASK" in name or "_CO_" in name) and "src2" in inst.op_regs
            count = sum(field in inst.op_regs for field in SOURCES) - carry
            read = {int(code) for code in record["src"][:count]} - {-1, *CONSTANTS}
            assert read <= {*values_of(inst, name), EXEC}, (name, inst)
            written = {int(record["dst"])} - {-1}
            assert written <= {*written_by(inst, name)}, (name, inst)
            seen.add(type(inst).__name__)
    assert {"VOP1_SDWA", "VOP2_DPP16", "VOP3P", "VOP3SD", "SOP2_LIT", "VOP1"} <= seen


TOUCHED = [("llama", "greedy"), ("llama", "edits")] + [
    pytest.param(case, name, marks=pytest.mark.slow) for case in CASES for name in ASKED
]


@pytest.mark.parametrize(("case", "name"), TOUCHED)
def test_what_the_walk_says_is_what_runs_touch(case, name):
    """Of every access of a small object that ran: it touched what the walk says, and nothing else."""
    backend = ExecutedBackend(case, Conditions(Memory(quantum=4000), 1))
    serve(backend, ASKED[name].request())
    ((variant, touched),) = backend.touched.items()
    found = {one.at: one for one in accesses_of(compiled(case, variant).code_object)}
    said = {at: {SAME_MEMORY.get(one, one) for one in found[at].arguments} for at in touched}
    assert len(touched) >= 60
    assert {at: names for at, names in touched.items() if not names <= said[at]} == {}
    assert len([at for at in touched if len(said[at]) > 1]) <= len(touched) // 20
