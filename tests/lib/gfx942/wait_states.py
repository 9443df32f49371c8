"""Instructions that follow too soon upon one whose result gfx942 does not make them wait for, on any way through code.

A compiler fills such distances with s_nop. Around assembly it does not, of which it knows no instruction, and LLVM 19
does not either where two ways meet and the longer one comes first in its search (AMD.md, "Wait states"). The distances
are those of LLVM's hazard recognizer for gfx942, which follows the table of manually inserted wait states in AMD's
manual of the ISA. Every instruction is one wait state, s_nop N is N + 1.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.flow import State, faults, registers

# What an instruction leaves behind in a register, and for how many wait states at most that is of interest.
SCALAR, VECTOR = "a scalar of a vector instruction", "a vector instruction's result"
SLOW, PART = "a transcendental result", "a result of half a register"
STORED, DOT = "data of a wide store", "a dot product"
MATRIX, SUMMAND = "a matrix product", "a matrix product's summand"
LONGEST = {SCALAR: 5, VECTOR: 2, SLOW: 1, PART: 1, STORED: 2, DOT: 3, MATRIX: 19, SUMMAND: 15}
MEMORY = ("GLOBAL_", "BUFFER_", "SCRATCH_", "FLAT_")
TRANSCENDENTAL = r"V_(EXP|LOG|RCP|RCP_IFLAG|RSQ|SQRT|SIN|COS)_"
TWO_RESULTS = r"_CO_|V_DIV_SCALE|V_MAD_[UI]64"
ADDS_TO_ITS_RESULT = r"V_(FMAC|DOT2C|WRITELANE|FMA_MIX(LO|HI))"
NO_RESULT = r"\w*_STORE|DS_(?!.*(READ|RTN|PERMUTE|SWIZZLE))|(S_CMP|S_BITCMP|S_C?BRANCH|S_SETPC)"
PART_OF_RESULT = r"dst_sel:(BYTE|WORD)|op_sel:\[\d,\d,(\d,)?1\]"  # the last bit, of the result
OTHER_HALVES = r"V_(PK|FMA_MIX|DOT)"  # all their bits are of operands
PASSES = {"4X4X4": 2, "16X16X16": 4, "32X32X8": 8}  # of a matrix instruction
OVERWRITES_SUMMAND = {2: 1, 4: 3, 8: 7}
# Whose distances nobody here has looked up.
UNKNOWN = (
    r"V_(CMPX|SWAP|PERMLANE|SMFMAC|MFMA_F64)|S_(SETREG|SENDMSG|MOVREL|SET_GPR|RFE)|"
    r"GWS|ADDTID|_LDS_|src_(vcc|exec)z"
)


class Unlisted(ValueError):
    """An instruction whose distances are not among these."""


class _Seen:
    """What an instruction reads and writes. Unlisted if it is one of those that are not known."""

    def __init__(self, name: str, text: str) -> None:
        if re.search(UNKNOWN, f"{name} {text}"):
            raise Unlisted(f"{text}: its wait states are not known")
        self.name = name
        mnemonic, _, operands = text.partition(" ")
        self.operands = operands.split(", ")
        self.vector, self.memory = name.startswith("V_"), name.startswith(MEMORY)
        self.matrix, self.lds = "MFMA" in name, name.startswith("DS_")
        self.dot, self.slow = name.startswith("V_DOT"), bool(re.match(TRANSCENDENTAL, name))
        self.dpp = "_dpp" in mnemonic
        self.part = bool(re.search(PART_OF_RESULT, text)) and not re.match(OTHER_HALVES, name)
        count = _results(name, text)
        self.writes = registers(", ".join(self.operands[:count]))
        self.inputs = registers(", ".join(self.operands[count:]))
        self.inputs |= {"vcc"} if "DIV_FMAS" in name else set()
        self.reads = self.inputs | (self.writes if re.match(ADDS_TO_ITS_RESULT, name) else set())
        stores = self.memory and re.search("STORE|ATOMIC", name)
        self.data = registers(self.operands[count + 1]) if stores else set()
        if stores and name.startswith("BUFFER_"):
            self.data = set() if self.operands[-1][0] == "s" else registers(self.operands[0])

    @property
    def passes(self) -> int:
        size = re.search(r"\d+X\d+X\d+", self.name)
        if size is None or size.group() not in PASSES:
            raise Unlisted(f"{self.name}: its passes are not known")
        return PASSES[size.group()]


_seen = functools.cache(_Seen)


def _results(name: str, text: str) -> int:
    """How many of its operands, the first ones, an instruction writes."""
    if re.match(NO_RESULT, name) or ("ATOMIC" in name and "sc0" not in text):
        return 0
    return 2 if re.search(TWO_RESULTS, name) else 1


def _left(one: _Seen) -> Iterator[tuple[str, Any]]:
    """Registers with what is left there: its kind, and what else counts of it."""
    for r in one.writes if one.vector else ():
        if r[0] == "s" or r == "vcc":
            yield r, (SCALAR,)
        elif one.matrix:
            yield r, (MATRIX, one.passes, one.operands[0])
        else:
            yield r, (DOT, one.name) if one.dot else (VECTOR,)
            if one.slow:
                yield r, (SLOW,)
            if one.part:
                yield r, (PART,)
    if one.matrix:
        yield from ((r, (SUMMAND, one.passes)) for r in registers(one.operands[3]))
    if len(one.data) > 2:
        yield from ((r, (STORED,)) for r in one.data)


def _needed(one: _Seen, register: str, kind: Any) -> int:
    """The wait states that have to lie between what was left in a register and an instruction."""
    what, reads, writes = kind[0], register in one.reads, register in one.writes
    if what == SCALAR and reads:
        lane = one.name in ("V_READLANE_B32", "V_WRITELANE_B32") and register in registers(one.operands[2])
        if one.memory:
            return 5
        return 4 if lane or "DIV_FMAS" in one.name else 2 * one.vector
    if what == VECTOR and register in one.inputs:
        if one.matrix or one.dpp:
            return 2
        return int(one.name in ("V_READLANE_B32", "V_READFIRSTLANE_B32"))
    if what in (SLOW, PART) and reads:
        return int(one.vector and not (what == SLOW and one.slow))
    if what == STORED and writes:
        return 2 * one.vector
    if not (one.vector or one.memory or one.lds):
        return 0
    if what == DOT and kind[1] != one.name:
        return 3 * (reads or writes)
    if what == DOT:
        return 3 * (register in one.inputs)
    if what == MATRIX:
        return _behind_matrix(one, register, *kind[1:])
    if what == SUMMAND and writes and not one.matrix:
        return OVERWRITES_SUMMAND[kind[1]]
    return 0


def _behind_matrix(one: _Seen, register: str, passes: int, result: str) -> int:
    if not one.matrix:
        return (passes + 3) * (register in one.reads | one.writes)
    if register in registers(", ".join(one.operands[1:3])):
        return passes + 3
    if register not in registers(one.operands[3]):
        return 0
    if one.operands[3].split()[0] == result:
        return 2 if passes == 2 else 0
    return passes + 1


def _step(state: State, at: int, name: str, text: str, inst: Any) -> tuple[State, list[str]]:
    if name == "S_NOP":
        return _later(state, inst.simm16 + 1), []
    one = _seen(name, text)
    touched = one.reads | one.writes
    bad = [
        f"{n} wait states behind {kind[0]} in {r}, of {needed}"
        for (r, kind), n in state.items()
        if r in touched and n < (needed := _needed(one, r, kind))
    ]
    if one.matrix:  # of products in one register the last counts, as LLVM has it
        state = {
            (r, kind): n
            for (r, kind), n in state.items()
            if r not in one.writes or kind[0] != MATRIX or kind[1] > one.passes
        }
    return _later(state, 1) | dict.fromkeys(_left(one), 0), bad


def _later(state: State, states: int) -> State:
    return {(r, kind): n + states for (r, kind), n in state.items() if n + states < LONGEST[kind[0]]}


def too_soon(code_object: CodeObject, kernel: str) -> list[str]:
    """The instructions of a kernel that follow too soon, each with upon what."""
    return faults(code_object, kernel, _step)
