"""What machine code's waits are for, on any way that it may take, whichever lanes are on: registers that a load is to
fill, and what is to have happened ahead of a barrier or a store."""

import functools
import re
from typing import Any

from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.flow import State, faults, registers, said

VECTOR, LDS, SCALAR = range(3)  # vmcnt counts the first, lgkmcnt the others
ANY = 63  # operations that a wait leaves in flight: no wait
KINDS = (r"(GLOBAL|BUFFER|SCRATCH)_(LOAD|STORE|ATOMIC|WBL2)", "DS_", r"S_(LOAD|MEM)")
# Where other waves may find out what has happened by then, and where this one may find out what others have done; of
# LDS, which takes what a wave asks in order, only the first.
TELLS = "S_BARRIER|(GLOBAL|BUFFER|SCRATCH)_(STORE|ATOMIC|WBL2)"
HEARS = "(GLOBAL|BUFFER|SCRATCH)_(LOAD|ATOMIC|INV)"
FILLS = r"LOAD|READ|PERMUTE|SWIZZLE|S_MEM|ATOMIC.* sc0"


def _most_left(wait: int) -> tuple[int, int, int]:
    """Of each kind, behind an s_waitcnt; scalar loads come in any order: all are there, or perhaps none."""
    return wait & 15 | wait >> 10 & 48, wait >> 8 & 15, ANY if wait >> 8 & 15 else 0


def _left(state: State, most: tuple[int, int, int]) -> State:
    """What may still be in flight behind a wait."""
    return {(op, k): n for (op, k), n in state.items() if n < most[k] or most[k] == ANY}


def _later(state: State, kind: int | None) -> State:
    """What is in flight, behind one more operation of a kind."""
    return {(op, k): n + (k == kind and n < ANY) for (op, k), n in state.items()}


@functools.cache
def _kind(name: str) -> int | None:
    return next((k for k, names in enumerate(KINDS) if re.match(names, name)), None)


@functools.lru_cache(1 << 16)  # a walk comes by more than once
def _used(name: str, text: str) -> tuple[frozenset[str], frozenset[str]]:
    """Registers that an instruction is to fill once its operation has ended, and those that it touches at once."""
    first, _, rest = text.partition(" ")[2].partition(",")
    fills = registers(first) if _kind(name) is not None and re.search(FILLS, name + text) else set()
    touched = registers(rest if fills and "D16" not in name else f"{first},{rest}")
    touched |= {"vcc"} if re.search("_VCC|DIV_FMAS|src_vcc", name + text) else set()
    return frozenset(fills), frozenset(touched)


def _step(state: State, at: int, name: str, text: str, inst: Any) -> tuple[State, set[str]]:
    """What is in flight behind an instruction, and what it touches of what was: of a register and what is to fill it,
    the fewest of that kind that were issued behind."""
    if name == "S_WAITCNT":
        return _left(state, _most_left(inst.simm16)), set()
    kind, (fills, touched) = _kind(name), _used(name, text)
    bad = {r for r, k in state if r in touched or (r in fills and (k != kind or k == SCALAR))}
    return _later(state, kind) | {(r, kind): 0 for r in fills if kind is not None}, bad


def kept_by(code_object: CodeObject, kernel: str, changed: dict[int, int]) -> set[tuple[int, int]]:
    """Operations that waves may find unfinished where they meet, on any way behind these waits, if the waits, by their
    offsets, had other operands; each with where that is, by theirs."""

    def lost(state: State, at: int, name: str, text: str, inst: Any) -> tuple[State, set[Any]]:
        if name != "S_WAITCNT":
            kind = _kind(name)
            new = {} if kind is None else {(at, kind): 0}
            return _later(state, kind) | new, set()
        left = _left(state, _most_left(inst.simm16))
        gone = {op for op in state if op not in left} if at in changed else set()
        kept = _left(state, _most_left(changed[at])) if gone else left
        return left, {(op, state[op]) for op in gone if op in kept}

    def follow(state: State, at: int, name: str, text: str, inst: Any) -> tuple[State, set[Any]]:
        if name == "S_WAITCNT":
            return _left(state, _most_left(changed.get(at, inst.simm16))), set()
        tells, hears = re.match(TELLS, name), re.match(HEARS, name)
        found = {(op, at) for op, k in state if tells or (hears and k == VECTOR)}
        # where it is issued again, that is another one
        return {op: n for op, n in _later(state, _kind(name)).items() if op[0] != at}, found

    missing: dict[int, State] = {}
    for at, (op, n) in said(code_object, kernel, lost):
        missing.setdefault(at, {})[op] = n
    return {found for at, state in missing.items() for _, found in said(code_object, kernel, follow, at, state)}


def touched_early(code_object: CodeObject, kernel: str) -> list[str]:
    """The instructions of a kernel that do so, each with the register."""
    return faults(code_object, kernel, _step)
