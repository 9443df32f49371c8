"""Mutants of a kernel, made from its machine code: every wait, scope bit, fence and barrier removed or weakened."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.lib.gfx942.executor import Kernel

VECTOR, SCALAR = 0b1100_0000_0000_1111, 0b1111_0000_0000  # the fields of s_waitcnt: vmcnt, lgkmcnt
MEMORY = ("GLOBAL_", "BUFFER_LOAD", "BUFFER_STORE")
TRIED = 64  # runs of a mutant before it is said to survive
FENCES = ("BUFFER_WBL2", "BUFFER_INV")


@dataclass(frozen=True)
class Mutant:
    """Of `original`: the instructions `changed` are `operation` instead, with these fields."""

    original: Kernel
    changed: list[int]
    operation: str
    fields: dict[str, Any]
    at: int  # byte of the first of them
    index: int
    what: str

    @property
    def kernel(self) -> Kernel:
        """Made when it is asked for: all of a large kernel's take gigabytes."""
        other = self.original.copy()
        other.replace(self.changed, self.operation, **self.fields)
        return other

    def named(self) -> str:
        """What changed, and the operation behind it: the same whichever compiler made it."""
        names = self.original.mnemonics()
        following = next(name for name in names[self.index + 1 :] if name not in ("S_WAITCNT", "S_NOP"))
        return f"{self.what} before {following}"


def one_less(wait: int, field: int) -> int:
    """The operand of an s_waitcnt that leaves one operation more in flight."""
    low = field & -field
    if wait & field == field:
        return wait
    if field == VECTOR and wait & 15 == 15:  # its upper bits stand apart
        return wait - 15 + (1 << 14)
    return wait + low


def mutants(kernel: Kernel) -> Iterator[Mutant]:
    """One change each, of every instruction that orders or scopes anything; waits in a row change together."""
    names = kernel.mnemonics()
    for index, name in enumerate(names):
        record = kernel.records[index]
        scope = int(record["scope"])
        changes = []
        run = [index]
        if name == "S_WAITCNT":
            if index and names[index - 1] == name:
                continue
            while names[run[-1] + 1] == name:
                run.append(run[-1] + 1)
            for field, said in ((VECTOR, "vmcnt"), (SCALAR, "lgkmcnt")):
                waits = [int(kernel.records["offset"][k]) for k in run]
                if any(wait & field != field for wait in waits):
                    changes += [
                        (f"no wait for {said}", name, {"offset": [wait | field for wait in waits]}),
                        (f"a wait for {said} but one", name, {"offset": [one_less(wait, field) for wait in waits]}),
                    ]
        elif name == "S_BARRIER":
            changes.append(("no barrier", "S_NOP", {}))
        elif name in FENCES:
            changes.append((f"no {name.lower()}", "S_NOP", {}))
            if scope == 3:
                changes.append((f"{name.lower()} of the agent", name, {"scope": 2}))
        elif name.startswith(MEMORY) and scope & 2:  # sc1
            weaker = {"scope": 2 if scope == 3 and "ATOMIC" not in name else scope & 1}
            changes.append((f"{name.lower()} of a narrower scope", name, weaker))
        for what, operation, fields in changes:
            yield Mutant(kernel, run, operation, fields, int(record["at"]), index, what)


def caught(kernel: Kernel, wrong: Callable[[Kernel, int], str], seeds: int = TRIED) -> str:
    """What is wrong with the first of `seeds` runs that shows it; "" if none does."""
    return next(filter(None, (wrong(kernel, seed) for seed in range(seeds))), "")
