"""Registers that machine code touches ahead of the wait for the load that is to fill them, on any way that it may take,
whichever lanes are on."""

import re
from typing import Any

from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.flow import State, faults, registers

VECTOR, LDS, SCALAR = range(3)  # vmcnt counts the first, lgkmcnt the others
KINDS = (r"(GLOBAL|BUFFER|SCRATCH)_(LOAD|STORE|ATOMIC|WBL2)", "DS_", r"S_(LOAD|MEM)")
FILLS = r"LOAD|READ|PERMUTE|SWIZZLE|S_MEM|ATOMIC.* sc0"


def _step(state: State, name: str, text: str, inst: Any) -> tuple[State, set[str]]:
    """What is in flight behind an instruction, and what it touches of what was: of a register and what is to fill it,
    the fewest of that kind that were issued behind."""
    if name == "S_WAITCNT":
        wait = inst.simm16
        most = (wait & 15 | wait >> 10 & 48, wait >> 8 & 15, wait >> 8 & 15)
        # scalar loads come in any order
        left = {
            (r, k): n for (r, k), n in state.items() if n < most[k] or (k == SCALAR and most[k])
        }
        return left, set()
    kind = next((k for k, names in enumerate(KINDS) if re.match(names, name)), None)
    first, _, rest = text.partition(" ")[2].partition(",")
    fills = registers(first) if kind is not None and re.search(FILLS, name + text) else set()
    touched = registers(rest if fills and "D16" not in name else f"{first},{rest}")
    touched |= {"vcc"} if re.search("_VCC|DIV_FMAS|src_vcc", name + text) else set()
    bad = {r for r, k in state if r in touched or (r in fills and (k != kind or k == SCALAR))}
    later = {(r, k): n + (k == kind and n < 63) for (r, k), n in state.items()}
    return later | {(r, kind): 0 for r in fills if kind is not None}, bad


def touched_early(code_object: CodeObject, kernel: str) -> list[str]:
    """The instructions of a kernel that do so, each with the register."""
    return faults(code_object, kernel, _step)
