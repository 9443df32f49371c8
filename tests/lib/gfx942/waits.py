"""Registers that machine code touches ahead of the wait for the load that is to fill them, on any way that it may take,
whichever lanes are on: by LLVM's disassembly, which names every operand but VCC."""

import re
from typing import Any

from tests.lib.gfx942 import clang
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.decode import SHORTEST, instructions, name_of, signed
from tests.lib.gfx942.jumps import Code, far_target

VECTOR, LDS, SCALAR = range(3)  # vmcnt counts the first, lgkmcnt the others
KINDS = (r"(GLOBAL|BUFFER|SCRATCH)_(LOAD|STORE|ATOMIC|WBL2)", "DS_", r"S_(LOAD|MEM)")
FILLS = r"LOAD|READ|PERMUTE|SWIZZLE|S_MEM|ATOMIC.* sc0"
# Of a register and what is to fill it: the fewest of that kind that were issued behind.
State = dict[tuple[str, int], int]


def _registers(text: str) -> set[str]:
    found = set()
    for kind, first, last in re.findall(r"\b(vcc|[vsa]\[?(?=\d))(\d*)(?::(\d+))?", text):
        numbers = range(int(first), int(last or first) + 1) if first else [""]
        found |= {f"{kind.strip('[')}{n}" for n in numbers}
    return found


def _step(state: State, name: str, text: str, inst: Any) -> tuple[State, set[str]]:
    """What is in flight behind an instruction, and what it touches of what was."""
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
    fills = _registers(first) if kind is not None and re.search(FILLS, name + text) else set()
    touched = _registers(rest if fills and "D16" not in name else f"{first},{rest}")
    touched |= {"vcc"} if re.search("_VCC|DIV_FMAS|src_vcc", name + text) else set()
    bad = {r for r, k in state if r in touched or (r in fills and (k != kind or k == SCALAR))}
    later = {(r, k): n + (k == kind and n < 63) for (r, k), n in state.items()}
    return later | {(r, kind): 0 for r in fills if kind is not None}, bad


def _goes_on(code: Code) -> list[list[int]]:
    """Where, behind each instruction."""
    index = {at: k for k, (at, _, _) in enumerate(code)}
    goes = [[k + 1] for k in range(len(code))]
    for k, (at, name, inst) in enumerate(code):
        if name == "S_ENDPGM":
            goes[k] = []
        elif name == "S_SETPC_B64":
            goes[k] = [index[far_target(code, k - 3)]]
        elif name.startswith(("S_BRANCH", "S_CBRANCH")):
            to = index[at + SHORTEST + 4 * signed(inst.simm16, 16)]
            goes[k] = [to] if name == "S_BRANCH" else [k + 1, to]
    return goes


def touched_early(code_object: CodeObject, kernel: str) -> list[str]:
    """The instructions of a kernel that do so, each by its offset and text, with the register."""
    lines = re.findall(r"\t(\S.*?)\s*// (\w+):", clang.disassembly(code_object, kernel))
    text_at = {int(at, 16) - int(lines[0][1], 16): text for text, at in lines}
    code = [(at, name_of(inst), inst) for at, inst in instructions(code_object.code(kernel)[1])]
    goes = _goes_on(code)
    begins = {to for k, ways in enumerate(goes) for to in ways if ways != [k + 1]}
    states: dict[int, State] = {0: {}}
    todo, found = [0], set[str]()
    while todo:
        k = todo.pop()
        state, ways = states[k], [k]
        while len(ways) == 1 and (ways == [k] or ways[0] not in begins):
            at, name, inst = code[ways[0]]
            state, bad = _step(state, name, text_at[at], inst)
            found |= {f"{at:#x} {text_at[at]}: {r}" for r in bad}
            ways = goes[ways[0]]
        for to in ways:
            old = states.get(to)
            new = (
                state if old is None else old | {r: min(n, old.get(r, n)) for r, n in state.items()}
            )
            if new != old:
                states[to] = new
                todo.append(to)
    return sorted(found)
