"""What a code object for gfx942 takes and does, read off its metadata and its machine code."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.decode import instructions, name_of

CUS = 304  # of an MI300X
SIMDS = 4  # of a CU
LANES = 64
VGPRS, GRANULE, MOST_WAVES = (
    512,
    8,
    8,
)  # registers of a lane on a SIMD, how they are dealt out, waves of a SIMD
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
    most_in_flight: int  # loads of 16 bytes of a wave on their way at once, in straight code
    write_backs_unawaited: (
        int  # buffer_wbl2 that no s_waitcnt follows before memory is touched again
    )

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
        _most_in_flight(decoded, names),
        _unawaited(decoded, names),
    )


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
        elif name.startswith(("GLOBAL_", "BUFFER_LOAD", "BUFFER_STORE")):
            queue.append(name in WIDE)
            most = max(most, sum(queue))
    return most


def _unawaited(decoded: list, names: list[str]) -> int:
    found = 0
    for i, name in enumerate(names):
        if name == "BUFFER_WBL2":
            behind = (
                k
                for k in range(i + 1, len(names))
                if names[k].startswith(("S_WAITCNT", "GLOBAL_", "BUFFER_"))
            )
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
