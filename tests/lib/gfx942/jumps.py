"""Where the flow of machine code goes on: behind each instruction, at the target of a branch, or of a far jump.

Behind a branch whose target is too far for its 16 bits LLVM writes four instructions that are one jump: they get the
program counter, add two literals to it, and set it. They are followed as one; any other use of the program counter is
not.
"""

from collections.abc import Iterable
from typing import Any

from tests.lib.gfx942.decode import LITERAL, SHORTEST, signed
from tests.lib.gfx942.lanes import Blocks, Untraced

FAR_JUMP = ("S_GETPC_B64", "S_ADD_U32", "S_ADDC_U32", "S_SETPC_B64")
Code = list[tuple[int, str, Any]]  # byte, name, decoded instruction


def blocks_of(code: Code, begins: Iterable[int]) -> Blocks:
    """Of each block's first instruction: the one behind its last, and where the flow goes on."""
    index = {at: i for i, (at, _, _) in enumerate(code)}
    goes: dict[int, list[int]] = {}
    inside: set[int] = set()  # of far jumps, behind their first instructions
    for i, (at, name, inst) in enumerate(code):
        if name == "S_ENDPGM":
            goes[i] = []
        elif name.startswith(("S_BRANCH", "S_CBRANCH")):
            to = index[at + SHORTEST + 4 * signed(inst.simm16, 16)]
            goes[i] = [to] if name == "S_BRANCH" else [to, i + 1]
        elif name == "S_SETPC_B64":
            goes[i] = [index[far_target(code, i - 3)]]
            inside.update(range(i - 2, i + 1))
    for i, (at, name, _) in enumerate(code):
        if name == "S_GETPC_B64" and i + 1 not in inside:
            raise Untraced(f"{name} at {at:#x} of no jump")
    targets = {0, *begins, *(k for to in goes.values() for k in to)}
    if targets & inside:
        raise Untraced(f"a branch into the far jump at {code[min(targets & inside)][0]:#x}")
    leaders = sorted(targets | {i + 1 for i in goes})
    ends = [*leaders[1:], len(code)]
    return {
        first: (last, goes.get(last - 1, [last]))
        for first, last in zip(leaders, ends, strict=True)
        if first < len(code)
    }


def far_target(code: Code, first: int) -> int:
    """The byte that the jump of four instructions from `first` on goes to."""
    at, name, inst = code[first + 3]
    jump = code[max(first, 0) : first + 4]
    if tuple(name for _, name, _ in jump) == FAR_JUMP:
        (_, _, get), (behind, _, low), (_, _, high), _ = jump
        pc = get.sdst.offset
        adds = all(
            (one.sdst.offset, one.ssrc0.offset, one.ssrc1.offset) == (half, half, LITERAL)
            for one, half in ((low, pc), (high, pc + 1))
        )
        if adds and inst.ssrc0.offset == pc:
            to: int = behind + signed(high.literal << 32 | low.literal, 64)
            if any(to == place for place, _, _ in code):
                return to
    raise Untraced(f"{name} at {at:#x} to an unknown place")
