"""Machine code that reads a register before it is there, found in `cuobjdump -sass`.

ptxas writes into each instruction how many cycles later the next one may issue. That of CUDA 13.0.88
forgets a zeroed register pair (CS2R) that a predicated instruction may write once more: where the
predicate is false, who reads the pair behind it gets what was there before the zero.
"""

import re
from dataclasses import dataclass

# The least between a CS2R and who reads it, of 12 kernels that were right on an H200; in the one that
# loaded from address 0 it was 5.
CS2R_CYCLES = 7
ENDS = re.compile(r"BRA|BRX|BSYNC|CALL|EXIT|JMP|RET|WARPSYNC")
NO_TARGET = re.compile(r"ATOMS?|BAR|FSETP|HSETP2|ISETP|PLOP3|RED|ST|SYNCS|UBLKCP")
LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/")


@dataclass(frozen=True)
class Instruction:
    address: int
    predicated: bool
    opcode: str
    operands: tuple[str, ...]
    cycles: int  # until the next instruction may issue

    @property
    def writes(self) -> set[int]:
        """Registers of its result."""
        if NO_TARGET.match(self.opcode) or not self.operands:
            return set()
        width = 4 if re.search(r"128|MMA", self.opcode) else 2
        if not re.search(r"64|128|MMA|WIDE|CS2R", self.opcode):
            width = 1
        return registers(self.operands[0], width)

    @property
    def reads(self) -> set[int]:
        """Registers of its other operands."""
        first = 0 if NO_TARGET.match(self.opcode) else 1
        sources = self.operands[first:]
        return set().union(*(registers(text, self._width(n, len(sources))) for n, text in enumerate(sources)))

    def _width(self, source: int, sources: int) -> int:
        """Registers of a source whose name says none: fragments, a sum of 64 bits, what is stored."""
        last = source == sources - 1
        if "HMMA" in self.opcode:
            return (4 if "16816" in self.opcode else 2, 2, 4)[min(source, 2)]
        if "WIDE" in self.opcode and last:
            return 2
        if self.opcode.startswith("ST") and last:
            return 4 if "128" in self.opcode else 2 if "64" in self.opcode else 1
        return 1


def registers(text: str, width: int = 1) -> set[int]:
    """Numbers of the registers that operands name, each with those beside it that it stands for."""
    return {
        int(first) + more
        for first, wide in re.findall(r"(?<![A-Z])R(\d+)(\.64)?", text)
        for more in range(2 if wide else width)
    }


def instructions(sass: str) -> list[Instruction]:
    """Of a `cuobjdump -sass` dump with its encodings, in order."""
    found = []
    for address, text, high in LINE.findall(sass):
        plain = re.sub(r"^@!?U?P\w+ ", "", text)
        opcode, _, operands = plain.partition(" ")
        cycles = int(high, 16) >> 41 & 15
        parts = tuple(part.strip() for part in operands.split(",")) if operands else ()
        found.append(Instruction(int(address, 16), plain != text, opcode, parts, cycles))
    return found


def read_too_early(code: list[Instruction]) -> list[tuple[int, int, int]]:
    """(address of a CS2R, address of who reads it, cycles between), where they are too few.

    Along straight code: what a branch leads to is not followed.
    """
    found = []
    for n, zero in enumerate(code):
        if not zero.opcode.startswith("CS2R") or zero.operands[1] != "SRZ":
            continue
        held, cycles = zero.writes, zero.cycles
        for later in code[n + 1 :]:
            if cycles >= CS2R_CYCLES or not held or ENDS.match(later.opcode):
                break
            if held & later.reads:
                found.append((zero.address, later.address, cycles))
                break
            if not later.predicated:
                held = held - later.writes
            cycles += later.cycles
    return found
