"""A walk over every way that a kernel's machine code may take, with something known of each place.

By LLVM's disassembly, which names every operand but VCC.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

from tests.lib.gfx942 import clang
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.decode import SHORTEST, instructions, name_of, signed
from tests.lib.gfx942.jumps import Code, far_target

# What is known at a place, each with how long it is so at least: where ways meet, what either says, and the shorter.
State = dict[Any, int]
# Of what is known ahead of an instruction, its offset, name, text and fields: what is known behind it, and what is said
# of it.
Step = Callable[[State, int, str, str, Any], tuple[State, Iterable[Any]]]


def registers(text: str) -> set[str]:
    """Those that operands name, each of 32 bits, but VCC as one."""
    found = set()
    for kind, first, last in re.findall(r"\b(vcc|[vsa]\[?(?=\d))(\d*)(?::(\d+))?", text):
        numbers = range(int(first), int(last or first) + 1) if first else [""]
        found |= {f"{kind.strip('[')}{n}" for n in numbers}
    return found


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


@functools.lru_cache(maxsize=4)
def _read(code_object: CodeObject, kernel: str) -> tuple[Code, dict[int, str], list[list[int]]]:
    """A kernel's instructions, the text of each by its byte, and where the flow goes on behind it."""
    lines = re.findall(r"\t(\S.*?)\s*// (\w+):", clang.disassembly(code_object, kernel))
    text_at = {int(at, 16) - int(lines[0][1], 16): text for text, at in lines}
    code = [(at, name_of(inst), inst) for at, inst in instructions(code_object.code(kernel)[1])]
    return code, text_at, _goes_on(code)


def faults(code_object: CodeObject, kernel: str, step: Step) -> list[str]:
    """What is wrong with a kernel's instructions, each by its offset and text."""
    text_at = _read(code_object, kernel)[1]
    return sorted(f"{at:#x} {text_at[at]}: {what}" for at, what in said(code_object, kernel, step))


def said(
    code_object: CodeObject, kernel: str, step: Step, begin: int = 0, known: State | None = None
) -> set[tuple[int, Any]]:
    """What is said of a kernel's instructions, each by its offset, from that at `begin` on, where so much is known."""
    code, text_at, goes = _read(code_object, kernel)
    begins = {to for k, ways in enumerate(goes) for to in ways if ways != [k + 1]}
    first = next(k for k, (at, _, _) in enumerate(code) if at == begin)
    states: dict[int, State] = {first: known or {}}
    todo, found = [first], set[tuple[int, Any]]()
    while todo:
        k = todo.pop()
        state, ways = states[k], [k]
        while len(ways) == 1 and (ways == [k] or ways[0] not in begins):
            at, name, inst = code[ways[0]]
            state, what = step(state, at, name, text_at[at], inst)
            found |= {(at, each) for each in what}
            ways = goes[ways[0]]
        for to in ways:
            old = states.get(to)
            new = state if old is None else old | {r: min(n, old.get(r, n)) for r, n in state.items()}
            if new != old:
                states[to] = new
                todo.append(to)
    return found
