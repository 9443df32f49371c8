"""What a code object for gfx942 takes and does, read off its metadata and its machine code, and what it may not."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.decode import instructions, name_of

CUS = 304  # of an MI300X
SIMDS = 4  # of a CU
LANES = 64
VGPRS, GRANULE, MOST_WAVES = (512, 8, 8)  # registers of a lane on a SIMD, how they are dealt out, waves of a SIMD
LDS_BYTES = 64 << 10  # of a CU
VMCNT_NONE = 0b1100_0000_0000_1111
WIDE = ("GLOBAL_LOAD_DWORDX4", "BUFFER_LOAD_DWORDX4")


@dataclass(frozen=True)
class Gates:
    """Of one kernel; `waves` are those of a workgroup, `lds` the bytes that a launch gives it."""

    vgprs: int  # accumulators included
    sgprs: int
    spilled: int  # VGPRs
    scratch: int  # bytes of a lane
    lds: int
    waves: int
    instructions: int
    counts: Counter[str]
    non_temporal: int  # of the loads of 16 bytes
    narrow: int  # non-temporal loads of less
    scopes: Counter[tuple[str, int, int, int]]  # memory operations by kind, sc0, sc1 and nt
    most_in_flight: int  # loads of 16 bytes of a wave on their way at once, in straight code
    write_backs_unawaited: int  # buffer_wbl2 that no s_waitcnt follows before memory is touched again

    def count(self, *names: str) -> int:
        return sum(n for name, n in self.counts.items() if name.startswith(names))

    @property
    def groups_per_cu(self) -> int:
        """Workgroups that fit a CU at once, by registers and LDS."""
        each = -(-self.vgprs // GRANULE) * GRANULE
        waves = SIMDS * min(MOST_WAVES, VGPRS // each)
        by_lds = LDS_BYTES // self.lds if self.lds else waves
        return min(waves // self.waves, by_lds)


def gates_of(code_object: CodeObject, kernel: str, lds: int, waves: int) -> Gates:
    facts = code_object.kernels[kernel]
    decoded = [inst for _, inst in instructions(code_object.code(kernel)[1])]
    names = [name_of(inst) for inst in decoded]
    wide = [inst for inst, name in zip(decoded, names, strict=True) if name in WIDE]
    return Gates(
        facts[".vgpr_count"],
        facts[".sgpr_count"],
        facts[".vgpr_spill_count"],
        facts[".private_segment_fixed_size"],
        facts[".group_segment_fixed_size"] + lds,
        waves,
        len(decoded),
        Counter(names),
        sum(inst.nt for inst in wide),
        sum(inst.nt for inst, name in zip(decoded, names, strict=True) if _narrow(name)),
        Counter(
            (_kind(name), inst.sc0, inst.sc1, inst.nt)
            for inst, name in zip(decoded, names, strict=True)
            if name.startswith(("GLOBAL_", "BUFFER_LOAD", "BUFFER_STORE"))
        ),
        _most_in_flight(decoded, names),
        _unawaited(decoded, names),
    )


def _narrow(name: str) -> bool:
    return name.startswith(("GLOBAL_LOAD", "BUFFER_LOAD")) and name not in WIDE


def _kind(name: str) -> str:
    return next(kind for kind in ("LOAD", "STORE", "ATOMIC") if kind in name)


PLAIN, SYSTEM, STREAMED = (0, 0, 0), (1, 1, 0), (1, 0, 1)  # sc0, sc1, nt


@dataclass(frozen=True)
class Needs:
    """What is asked of a kernel: at least so many instructions of a kind, and a grid that is resident at once."""

    blocks: int = 1
    mfma: int = 0
    dot2: int = 0
    non_temporal: int = 0
    spilled: int = 0  # at most, into accumulators
    scratch: int = 0  # bytes of a lane at most
    scoped_loads: int = 0
    scoped_stores: int = 0


def refused(gates: Gates, needs: Needs) -> dict[str, str]:
    """Every gate that the kernel does not pass, and why.

    Of memory operations the Triton kernel has three forms: plain, of system scope (sc0 sc1: what others read or write),
    streamed (sc0 nt: weights); atomics act in the L2, in the scope of their fences. Any other form has lost a bit.
    """
    waves_of_simd = -(-gates.waves // SIMDS)
    most = VGPRS // waves_of_simd // GRANULE * GRANULE
    scoped = {kind: gates.scopes[kind, *SYSTEM] for kind in ("LOAD", "STORE")}
    odd = [form for form in gates.scopes if form[0] != "ATOMIC" and form[1:] not in (PLAIN, SYSTEM, STREAMED)]
    wrong = {
        "spills": gates.spilled > needs.spilled and f"{gates.spilled} registers are spilled",
        "scratch": gates.scratch > needs.scratch and f"{gates.scratch} bytes of scratch a lane",
        "registers": gates.vgprs > most and f"{gates.vgprs} registers: a workgroup has room for {most}",
        "LDS": gates.lds > LDS_BYTES and f"{gates.lds} bytes of LDS: a CU has {LDS_BYTES}",
        "residency": needs.blocks > CUS * gates.groups_per_cu
        and f"{gates.groups_per_cu} workgroups fit a CU: {needs.blocks} do not fit {CUS}",
        "non-temporal loads": gates.non_temporal < needs.non_temporal
        and f"{gates.non_temporal} of {needs.non_temporal}",
        "narrow loads": gates.narrow and f"{gates.narrow} non-temporal loads of less than 16 bytes",
        "MFMA": gates.count("V_MFMA") < needs.mfma and f"{gates.count('V_MFMA')} of {needs.mfma}",
        "dot2": gates.count("V_DOT2") < needs.dot2 and f"{gates.count('V_DOT2')} of {needs.dot2}",
        "scopes": odd and f"sc0, sc1, nt of {odd}",
        "shared loads": scoped["LOAD"] < needs.scoped_loads
        and f"{scoped['LOAD']} of {needs.scoped_loads}",
        "shared stores": scoped["STORE"] < needs.scoped_stores
        and f"{scoped['STORE']} of {needs.scoped_stores}",
    }  # fmt: skip
    return {gate: why for gate, why in wrong.items() if why}


def _vmcnt(inst: Any) -> int:
    return inst.simm16 & 15 | (inst.simm16 >> 14 & 3) << 4


def _most_in_flight(decoded: list, names: list[str]) -> int:
    """The queue of a wave as the code stands, branches aside: which entries are loads of 16 bytes."""
    queue: list[bool] = []
    most = 0
    for inst, name in zip(decoded, names, strict=True):
        if name == "S_WAITCNT":
            keep = _vmcnt(inst)
            queue = queue[len(queue) - keep :] if keep < len(queue) else queue
        elif name.startswith("S_CBRANCH") or name == "S_BRANCH":
            queue = []
        elif name.startswith(("GLOBAL_", "SCRATCH_", "BUFFER_LOAD", "BUFFER_STORE")):
            queue.append(name in WIDE)
            most = max(most, sum(queue))
    return most


def _unawaited(decoded: list, names: list[str]) -> int:
    found = 0
    for i, name in enumerate(names):
        if name == "BUFFER_WBL2":
            behind = (k for k in range(i + 1, len(names)) if names[k].startswith(("S_WAITCNT", "GLOBAL_", "BUFFER_")))
            after = next(behind)
            found += names[after] != "S_WAITCNT" or _vmcnt(decoded[after]) != 0
    return found


SYNCHRONIZES = ("S_BARRIER", "BUFFER_WBL2", "BUFFER_INV", "GLOBAL_ATOMIC_ADD")


def fences_of(code_object: CodeObject, kernel: str) -> Counter[tuple[str, ...]]:
    """What stands around each release of a fence, from the barrier before it to the barrier behind it."""
    decoded = [inst for _, inst in instructions(code_object.code(kernel)[1])]
    kept = []
    for inst in decoded:
        name = name_of(inst)
        if name == "S_WAITCNT" and not _vmcnt(inst):
            kept.append("S_WAITCNT vmcnt(0)")
        elif name.startswith(SYNCHRONIZES):
            kept.append(name if name == "S_BARRIER" else f"{name} {inst.sc0}{inst.sc1}")
    found: Counter[tuple[str, ...]] = Counter()
    for i, name in enumerate(kept):
        if name.startswith("GLOBAL_ATOMIC_ADD"):
            first = max(k for k in range(i) if kept[k] == "S_BARRIER")
            last = min(k for k in range(i, len(kept)) if kept[k] == "S_BARRIER")
            found[tuple(kept[first - 1 : last + 1])] += 1
    return found
