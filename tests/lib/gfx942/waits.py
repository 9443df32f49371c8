"""What machine code's waits are for, on any way that it may take, whichever lanes are on: registers that a load is to
fill, and what is to have happened ahead of a barrier or a store."""

import re
from typing import Any

from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.flow import State, faults, registers, said

VECTOR, LDS, SCALAR = range(3)  # vmcnt counts the first, lgkmcnt the others
KINDS = (r"(GLOBAL|BUFFER|SCRATCH)_(LOAD|STORE|ATOMIC|WBL2)", "DS_", r"S_(LOAD|MEM)")
# Where other waves may find out what has happened by then, and where this one may find out what others have done; of
# LDS, which takes what a wave asks in order, only the first.
TELLS = "S_BARRIER|(GLOBAL|BUFFER|SCRATCH)_(STORE|ATOMIC|WBL2)"
HEARS = "(GLOBAL|BUFFER|SCRATCH)_(LOAD|ATOMIC|INV)"
FILLS = r"LOAD|READ|PERMUTE|SWIZZLE|S_MEM|ATOMIC.* sc0"


def _most_left(inst: Any) -> tuple[int, int, int]:
    """Of each kind, behind an s_waitcnt; scalar loads come in any order: all are there, or perhaps none."""
    wait = inst.simm16
    return wait & 15 | wait >> 10 & 48, wait >> 8 & 15, 63 if wait >> 8 & 15 else 0


def _step(state: State, at: int, name: str, text: str, inst: Any) -> tuple[State, set[str]]:
    """What is in flight behind an instruction, and what it touches of what was: of a register and what is to fill it,
    the fewest of that kind that were issued behind."""
    if name == "S_WAITCNT":
        most = _most_left(inst)
        return {(r, k): n for (r, k), n in state.items() if n < most[k] or most[k] == 63}, set()
    kind = _kind(name)
    first, _, rest = text.partition(" ")[2].partition(",")
    fills = registers(first) if kind is not None and re.search(FILLS, name + text) else set()
    touched = registers(rest if fills and "D16" not in name else f"{first},{rest}")
    touched |= {"vcc"} if re.search("_VCC|DIV_FMAS|src_vcc", name + text) else set()
    bad = {r for r, k in state if r in touched or (r in fills and (k != kind or k == SCALAR))}
    later = {(r, k): n + (k == kind and n < 63) for (r, k), n in state.items()}
    return later | {(r, kind): 0 for r in fills if kind is not None}, bad


def _step_of_meetings(
    state: State, at: int, name: str, text: str, inst: Any
) -> tuple[State, set[int]]:
    """The same of operations, by their offsets, and which may be in flight where waves meet."""
    if name == "S_WAITCNT":
        most = _most_left(inst)
        return {(op, k): n for (op, k), n in state.items() if n < most[k] or most[k] == 63}, set()
    tells, hears = re.match(TELLS, name), re.match(HEARS, name)
    open_here = {op for op, k in state if tells or (hears and k == VECTOR)}
    kind = _kind(name)
    if kind is None:
        return state, open_here
    return {(op, k): n + (k == kind and n < 63) for (op, k), n in state.items()} | {
        (at, kind): 0
    }, open_here


def _kind(name: str) -> int | None:
    return next((k for k, names in enumerate(KINDS) if re.match(names, name)), None)


def open_at_meetings(code_object: CodeObject, kernel: str) -> set[tuple[int, int]]:
    """Offsets of what tells or hears, each with that of an operation which may be in flight there."""
    return said(code_object, kernel, _step_of_meetings)


def touched_early(code_object: CodeObject, kernel: str) -> list[str]:
    """The instructions of a kernel that do so, each with the register."""
    return faults(code_object, kernel, _step)
