"""Into which of a kernel's arguments each of its memory accesses points, by a walk over its machine code.

Every register holds the set of those arguments that are pointers and that its value may be made of. Arithmetic and
choices give unions, comparisons and what comes from memory or LDS nothing; where paths meet, sets unite, and so they do
where lanes come back that were off (lanes.py). Scratch, a lane's own memory into which LLVM spills registers, is
followed word by word as registers are, where the code alone says which words. An address is known if both its halves
are made of the same arguments, and its offsets of none. Indices are not followed: one that leaves its argument's memory
is not seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.decode import (
    ACCUMULATOR,
    ADDS_TO_ITS_RESULT,
    OFF,
    TO_SCALAR,
    VCC,
    VECTOR,
    instructions,
    name_of,
    signed,
)
from tests.lib.gfx942.executor import PRELOAD_ENTRY
from tests.lib.gfx942.jumps import blocks_of
from tests.lib.gfx942.lanes import COMBINES, NOTHING, Lanes, Mask, Untraced, join
from tests.lib.gfx942.lanes import needed as needed_before

CONSTANTS = range(128, VECTOR)  # operand codes of no register
ZERO = 128
SCRATCH = 1024  # the code of its first word, behind those of registers
SPILLS = tuple(f"SCRATCH_{kind}_DWORD{wide}" for kind in ("LOAD", "STORE") for wide in ("", "X2", "X3", "X4"))
WHOLE_WORD = 6  # of SDWA's selections
SOURCES = ("src0", "src1", "src2", "vsrc0", "vsrc1", "ssrc0", "ssrc1")
REFUSED = (
    *("V_CMPX", "V_SWAP", "S_SWAPPC", "S_CALL", "S_CBRANCH_G", "S_CBRANCH_J", "S_MOVREL"),
    *("S_SET_GPR", "FLAT_", "S_SCRATCH", "S_STORE", "S_ATOMIC", "S_BUFFER_", "TBUFFER_"),
)  # fmt: skip
NO_MEMORY = ("BUFFER_WBL2", "BUFFER_INV")
ADDRESSED = ("GLOBAL_", "BUFFER_", "S_LOAD")
State = dict[Any, frozenset[str]]  # of a register, or of one of its lanes (register, lane)


@dataclass(frozen=True)
class Access:
    """One memory instruction; `arguments` that its address is made of, none if that is unknown."""

    at: int  # byte in the kernel
    name: str
    arguments: frozenset[str]
    form: tuple[int, int, int]  # sc0, sc1, nt; of scalar loads zeros

    @property
    def kind(self) -> str:
        return next(kind for kind in ("S_LOAD", "LOAD", "STORE", "ATOMIC") if kind in self.name)


def accesses(code_object: CodeObject, kernel: str, names: Sequence[str]) -> list[Access]:
    """All of a kernel whose arguments are called `names`, in the order of its code; their own memory is "kernarg".

    Untraced if the code has what the walk does not follow.
    """
    return _Walk(code_object, kernel, names).accesses()


class Moves(NamedTuple):
    """What an instruction makes of its operands, as registers: each of `written` of all of the values beside it."""

    written: tuple[tuple[Any, tuple[Any, ...]], ...] = ()
    address: tuple[tuple[int, int], tuple[int, ...]] | None = None  # of an access: both halves, offsets
    first_word: int = -1  # of the kernel's arguments, which it loads if they are at its address


class _Walk:
    def __init__(self, code_object: CodeObject, kernel: str, names: Sequence[str]) -> None:
        address, code = code_object.code(kernel)
        self.code = [(at, name_of(inst), inst) for at, inst in instructions(code)]
        index = {at: i for i, (at, _, _) in enumerate(self.code)}
        for at, name, _ in self.code:
            if name.startswith(REFUSED):
                raise Untraced(f"{name} at {at:#x}")
        self._check_lanes()
        self.moves = [_moves(inst, name) for _, name, inst in self.code]
        self.words = _words_of(code_object.kernels[kernel][".args"], names)
        d = code_object.descriptor(kernel)
        state: State = {0: frozenset({"kernarg"}), 1: frozenset({"kernarg"})} if d.has_kernarg else {}
        count, first = d.preloaded
        held = {2 * d.has_kernarg + k: self.words[first + k] for k in range(count) if first + k in self.words}
        # Firmware that preloads arguments leaves out the first bytes, which load them.
        begin = d.entry - address
        begins = {index[begin]: state}
        if count:
            begins[index[begin + PRELOAD_ENTRY]] = state | held
        self.blocks = blocks_of(self.code, begins)
        self.block_of = {i: first for first, (last, _) in self.blocks.items() for i in range(first, last)}
        lanes = Lanes([_mask(inst, name) for _, name, inst in self.code], self.blocks, sorted(begins))
        self._follow(begins, lanes.rejoined)

    def _check_lanes(self) -> None:
        """Registers that hold scalars in single lanes do nothing else: no lane is written or read that is computed."""
        held = {inst.vdst.offset for _, name, inst in self.code if name == "V_WRITELANE_B32"}
        for at, name, inst in self.code:
            single = name in ("V_READLANE_B32", "V_WRITELANE_B32")
            register = inst.src0.offset if name == "V_READLANE_B32" else inst.vdst.offset if single else 0
            computed = single and register in held and inst.src1.offset not in CONSTANTS
            if computed or (name != "V_WRITELANE_B32" and not held.isdisjoint(written_by(inst, name))):
                raise Untraced(f"{name} at {at:#x} of a register that holds scalars in its lanes")

    # ---- the flow ----

    def _follow(self, begins: dict[int, State], rejoined: dict[int, set[int]]) -> None:
        self.before: dict[int, State] = {}
        self.rejoined = rejoined
        self.off: dict[int, State] = {i: {} for went in rejoined.values() for i in went}  # what lanes hold that are off
        back: dict[int, set[int]] = {i: set() for i in self.off}
        for i, went in rejoined.items():
            for k in went:
                back[k].add(self.block_of[i])
        needed = self._needed()
        for i, state in begins.items():
            join(self.before.setdefault(i, {}), state)
        waiting = set(begins)
        while waiting:
            first = min(waiting)
            waiting.remove(first)
            state = dict(self.before[first])
            last, following = self.blocks[first]
            for i in range(first, last):
                if i in self.off and join(self.off[i], {k: v for k, v in state.items() if k in self.off_needed[i]}):
                    waiting |= back[i] & self.before.keys()
                self._step(i, state)
            for i in following:
                new = i not in self.before
                known = {k: v for k, v in state.items() if k in needed[i]}
                if join(self.before.setdefault(i, {}), known) or new:
                    waiting.add(i)

    def _needed(self) -> dict[int, set]:
        """Of each block, the registers before it of which an address may yet be made: no other is followed."""
        self.off_needed: dict[int, set] = {i: set() for i in self.off}

        def need(i: int, held: set) -> list[int]:
            again = []
            for k in self.rejoined.get(i, ()):
                vectors = {code for code in held if isinstance(code, int) and code >= VECTOR}
                if not vectors <= self.off_needed[k]:
                    self.off_needed[k] |= vectors
                    again.append(self.block_of[k])
            moves = self.moves[i]
            used = [source for code, sources in moves.written if code in held for source in sources]
            held.difference_update(code for code, _ in moves.written)
            held.update(used)
            if moves.address:
                held.update(*moves.address)
            held.update(self.off_needed.get(i, ()))
            return again

        return needed_before(self.blocks, need)

    def _step(self, i: int, state: State) -> None:
        moves = self.moves[i]
        values = [_union(state, sources) for _, sources in moves.written]
        if moves.first_word >= 0 and _arguments(state, moves) == {"kernarg"}:
            words = range(moves.first_word, moves.first_word + len(values))
            values = [self.words.get(word, NOTHING) for word in words]
        for (code, _), value in zip(moves.written, values, strict=True):
            if value:
                state[code] = value
            else:
                state.pop(code, None)
        for went in self.rejoined.get(i, ()):
            join(state, self.off[went])

    def accesses(self) -> list[Access]:
        found = []
        for first, (last, _) in self.blocks.items():
            state = dict(self.before[first]) if first in self.before else None
            for i in range(first, last):
                at, name, inst = self.code[i]
                if _is_access(name):
                    form = (0, 0, 0) if name.startswith("S_LOAD") else (inst.sc0, inst.sc1, inst.nt)
                    # None leads to what no path reaches.
                    made_of = NOTHING if state is None else _arguments(state, self.moves[i])
                    found.append(Access(at, name, made_of, form))
                if state is not None:
                    self._step(i, state)
        return found


def _words_of(args: list[dict[str, Any]], names: Sequence[str]) -> dict[int, frozenset[str]]:
    """What each word of the arguments' memory holds."""
    explicit = [a for a in args if not a[".value_kind"].startswith("hidden_")]
    if len(explicit) != len(names):
        raise Untraced(f"the kernel has {len(explicit)} arguments, not {len(names)}")
    return {
        word: frozenset({name})
        for arg, name in zip(explicit, names, strict=True)
        if arg[".value_kind"] == "global_buffer"
        for word in range(arg[".offset"] // 4, (arg[".offset"] + arg[".size"]) // 4)
    }


def _union(state: State, codes: Iterable[Any]) -> frozenset[str]:
    return NOTHING.union(*(state[code] for code in codes if code in state))


def _is_access(name: str) -> bool:
    return name.startswith(ADDRESSED) and name not in NO_MEMORY


def _arguments(state: State, moves: Moves) -> frozenset[str]:
    assert moves.address
    halves, offsets = moves.address
    low, high = (state.get(code, NOTHING) for code in halves)
    return low if low == high and not _union(state, offsets) else NOTHING


# ---- operands ----


def _span(inst: Any, field: str, name: str) -> list[int]:
    """The registers of an operand; of a constant its code alone."""
    kind = type(inst).__name__
    elsewhere = field == "src0" and ("DPP" in kind or "SDWA" in kind)
    first = getattr(inst, "vsrc0" if elsewhere else field).offset
    if first in CONSTANTS:
        return [first]
    first += _shift(inst, field, name)
    return list(range(first, first + inst.op_regs[field]))


def _shift(inst: Any, field: str, name: str) -> int:
    """From a field's code to the register's: accumulators stand above vector registers, some results are scalar."""
    up = ACCUMULATOR - VECTOR
    if field == "vdst" and name in TO_SCALAR:
        return -VECTOR
    if name.startswith("V_MFMA"):
        accumulates = inst.acc_cd if field in ("vdst", "src2") else inst.acc >> int(field[3]) & 1
        return up * bool(accumulates)
    if name.startswith("V_ACCVGPR"):
        return up * (name.endswith("MOV_B32") or (field == "vdst") == name.endswith("WRITE"))
    if field in ("vdst", "vdata", "data"):
        return up * (name.startswith(("GLOBAL_", "BUFFER_", "DS_", "SCRATCH_")) and inst.acc)
    scalar = "SDWA" in type(inst).__name__ and field[-1] in "01" and getattr(inst, f"s{field[-1]}")
    return -VECTOR * scalar


def written_by(inst: Any, name: str) -> list[int]:
    if "STORE" in name or ("ATOMIC" in name and not inst.sc0):
        return []
    out = []
    for field in ("vdst", "sdst", "sdata", "vdata"):
        if field in inst.op_regs:
            out += _span(inst, field, name)
    gives_mask = name.startswith("V_CMP") or (name.startswith("V_") and "_CO_" in name)
    if gives_mask and not any(code < VECTOR for code in out):
        mask = inst.sdst.offset if "SDWA" in type(inst).__name__ and inst.sd else VCC
        out += [mask, mask + 1]
    return out


def values_of(inst: Any, name: str) -> list[int]:
    """Registers that the result is made of: no masks, no carries."""
    out = []
    for field in SOURCES:
        carry = field == "src2" and ("CNDMASK" in name or "_CO_" in name)
        if field in inst.op_regs and not carry:
            out += _span(inst, field, name)
    kind = type(inst).__name__
    narrow = "SDWA" in kind and not name.startswith("V_CMP") and inst.dst_sel != WHOLE_WORD
    keeps = "DPP" in kind or narrow or kind.startswith("SOPK") or name in ADDS_TO_ITS_RESULT
    if (keeps and name != "S_MOVK_I32") or name.startswith(("S_CMOV", "S_BITSET")):
        out += written_by(inst, name)
    return [code for code in out if code not in CONSTANTS]


def _address(inst: Any, name: str) -> tuple[tuple[int, int], tuple[int, ...]]:
    if name.startswith("S_LOAD"):
        base, offsets = inst.sbase.offset, [inst.soffset.offset] if inst.soffset_en else []
    elif name.startswith("BUFFER_"):
        base = inst.srsrc.offset
        offsets = [base + 2, base + 3, inst.soffset.offset]
        offsets += _span(inst, "vaddr", name) if inst.offen or inst.idxen else []
    elif inst.saddr.offset < OFF:
        base, offsets = inst.saddr.offset, [inst.addr.offset]
    else:
        base, offsets = inst.addr.offset, []
    return (base, base + 1), tuple(code for code in offsets if code not in CONSTANTS)


def _moves(inst: Any, name: str) -> Moves:
    written = written_by(inst, name)
    nothing = Moves(tuple((code, ()) for code in written))
    if _is_access(name):
        known = name.startswith("S_LOAD") and inst.imm and not inst.soffset_en
        return nothing._replace(address=_address(inst, name), first_word=inst.offset // 4 if known else -1)
    if name.startswith("SCRATCH_"):
        return _spill(inst, name)
    if name.startswith(("DS_", "V_CMP", "V_MFMA")):
        return nothing
    values = tuple(values_of(inst, name))
    if name == "V_WRITELANE_B32":
        return Moves((((written[0], inst.src1.offset), (inst.src0.offset,)),))
    if name == "V_READLANE_B32":
        values = (inst.src0.offset, (inst.src0.offset, inst.src1.offset))
    if name in ("S_MOV_B64", "V_MOV_B64") and len(values) == 2:
        return Moves(tuple((code, (value,)) for code, value in zip(written, values, strict=True)))
    masks = [code for code in written if code < VECTOR and name.startswith("V_") and name not in TO_SCALAR]
    return Moves(tuple((code, () if code in masks else values) for code in written))


def _spill(inst: Any, name: str) -> Moves:
    """Words of registers to a lane's own memory, or back."""
    offset = signed(inst.offset, 13)
    if name not in SPILLS or inst.saddr.offset < OFF or inst.sve or offset < 0 or offset % 4:
        raise Untraced(f"{name} of more than a constant offset, or of less than words")
    stores = "STORE" in name
    registers = _span(inst, "data" if stores else "vdst", name)
    slots = range(SCRATCH + offset // 4, SCRATCH + offset // 4 + len(registers))
    written, read = (slots, registers) if stores else (registers, slots)
    return Moves(tuple((code, (value,)) for code, value in zip(written, read, strict=True)))


def _mask(inst: Any, name: str) -> Mask:
    """What the instruction does to masks (lanes.py)."""
    written = written_by(inst, name)
    scalars = tuple(code for code in written if code < VECTOR)
    if name == "V_WRITELANE_B32":
        return Mask("COPY", ((written[0], inst.src1.offset),), (inst.src0.offset,))
    if name == "V_READLANE_B32":
        return Mask("COPY", scalars, ((inst.src0.offset, inst.src1.offset),))
    if name.startswith("V_") and name not in TO_SCALAR:
        return Mask("COMPARE", scalars)
    codes = tuple(getattr(inst, f).offset for f in ("ssrc0", "ssrc1") if f in inst.op_regs)
    if name in ("S_MOV_B64", "S_MOV_B32"):
        width = 2 if name.endswith("64") else 1
        if codes[0] == ZERO:
            return Mask("CLEAR", scalars)
        if codes[0] not in CONSTANTS:
            return Mask("COPY", scalars, tuple(codes[0] + k for k in range(width)))
    how, saves = name[2:-4].removesuffix("_SAVEEXEC"), "SAVEEXEC" in name
    if name.startswith("S_") and name.endswith("_B64") and how in COMBINES:
        return Mask(how, scalars, codes, saves)
    return Mask("UNKNOWN", scalars)
