"""Machine code to the records that the executor runs (cpp/state.h, struct Inst), by tinygrad's decoder."""

import re
from typing import Any

import numpy as np
from tinygrad.renderer.amd import decode_inst

from tests.lib.gfx942.code_object import text_name

FIELDS = [
    *("op", "at", "target", "dst", "sdst"),
    ("src", 3),
    *("addr", "saddr", "data", "literal", "offset", "offset1", "scope", "flags"),
    *("neg", "abs", "opsel", "opsel_hi", "neg_hi", "dpp", "row_mask", "bank_mask", "bound"),
    *("sdwa", "dst_sel", "dst_unused"),
    ("sel", 2),
    ("sext", 2),
]
RECORD = np.dtype([(f, "i4") if isinstance(f, str) else (f[0], "i4", f[1:]) for f in FIELDS])
VCC, LITERAL, VECTOR, ACCUMULATOR, OFF = 106, 255, 256, 512, 127
OFFEN, IDXEN, RETURNS = 1, 2, 4
SHORTEST = 4  # bytes
MOST_BYTES = 16
READS_VCC = ("V_CNDMASK_B32", "V_ADDC_CO_U32", "V_SUBB_CO_U32", "V_SUBBREV_CO_U32")  # in 32 bits
ADDS_TO_ITS_RESULT = ("V_FMAC_F32", "V_FMAC_F64", "V_DOT2C_F32_F16")
TO_SCALAR = ("V_READLANE_B32", "V_READFIRSTLANE_B32")


# Fields that say what the instruction is, DPP's and SDWA's mark in place of an operand, a hint.
UNREAD = {"encoding", "op", "seg", "src0", "nt"}
# Other names of a matrix instruction's bits cbsz, abid, blgp, acc and acc_cd.
SAME_BITS = {"neg", "neg_hi", "opsel", "opsel_hi", "opsel_hi2", "clmp"}
# Operations whose semantics take a modifier: of numbers; of halves of registers.
TAKEN = {"neg": r"F16|F32|F64|CNDMASK", "abs": r"F16|F32|F64|CNDMASK", "opsel": r"16|V_PK_|FMA_MIX"}
NO_DPP = r"_CO_|V_DOT2C"  # they write all lanes that are on


# What was decoded in this process, by the instruction's bytes: half of a kernel's come again, and kernels are alike.
# The first four say how many there are, so that none begins another.
_decoded: dict[bytes, Any] = {}
_begins: dict[bytes, int] = {}
# Records of those whose place is 0, by what the executor knows and the instruction.
_filled: dict[int, tuple[dict[str, int], dict[int, Any]]] = {}


class Unknown(ValueError):
    """An instruction that the executor does not know."""


def instructions(code: bytes) -> list[tuple[int, Any]]:
    """(byte, decoded instruction) of straight machine code; of equal bytes it is the same object."""
    out, at = [], 0
    while at < len(code):
        size = _begins.get(code[at : at + SHORTEST], 0)
        inst = _decoded.get(code[at : at + size])
        if inst is None:
            inst = _decode(code[at : at + MOST_BYTES].ljust(MOST_BYTES, b"\0"), size)
        out.append((at, inst))
        at += inst.size()
    return out


def _decode(code: bytes, size: int) -> Any:
    """What `code` begins with; `size` is that of others with the same first four bytes, 0 if there were none."""
    inst = decode_inst(code, "cdna")
    assert size in (0, inst.size()), "an instruction whose first word does not say how long it is"
    _begins[code[:SHORTEST]] = inst.size()
    _decoded[code[: inst.size()]] = inst
    return inst


def name_of(inst: Any) -> str:
    return text_name(inst.op.name)


def decode(code: bytes, operations: dict[str, int]) -> np.ndarray:
    """Records of a kernel's code. Unknown names every mnemonic and every modifier that the executor lacks."""
    decoded = instructions(code)
    unknown = sorted({name_of(inst) for _, inst in decoded} - operations.keys())
    if unknown:
        raise Unknown(f"the executor does not know {', '.join(unknown)}")
    index = {at: i for i, (at, _) in enumerate(decoded)}
    records = np.zeros(len(decoded), RECORD)
    _, filled = _filled.setdefault(id(operations), (operations, {}))
    for i, (at, inst) in enumerate(decoded):
        if id(inst) not in filled:
            record = np.zeros((), RECORD)
            _fill(record, at, inst, operations)
            filled[id(inst)] = record
        records[i] = filled[id(inst)]
        name = name_of(inst)
        if name.startswith(("S_BRANCH", "S_CBRANCH")):
            records[i]["target"] = index[at + SHORTEST + 4 * signed(inst.simm16, 16)]
    records["at"] = [at for at, _ in decoded]
    return records


def _fill(record: Any, at: int, inst: Any, operations: dict[str, int]) -> None:
    """All but its place, and where it jumps to."""
    name, kind = name_of(inst), type(inst).__name__
    read = _Read(inst)
    saturates = f"{name}_CLAMP" in operations and _has(inst, "clmp") and read.clmp
    record["op"] = operations[f"{name}_CLAMP" if saturates else name]
    for field in ("dst", "sdst", "addr", "saddr", "data", "dpp", "target"):
        record[field] = -1
    record["src"] = -1
    record["literal"] = signed(getattr(read, "literal", 0), 32)
    for prefix, fill in FILL.items():
        if kind.startswith(prefix):
            fill(record, read, name)
            break
    else:
        raise Unknown(f"{name} in the encoding {kind} at {at:#x}")
    for field, _ in inst._fields:
        if field not in read.seen | UNREAD | (SAME_BITS if "MFMA" in kind else set()):
            value = getattr(inst, field)
            if getattr(value, "offset", value):
                raise Unknown(f"{name} with {field} at {at:#x}")
    _check_modifiers(record, name, at)


class _Read:
    """An instruction that notes which of its fields are read: one that is set and that nobody reads is refused."""

    def __init__(self, inst: Any) -> None:
        self.inst, self.seen = inst, set[str]()

    def __getattr__(self, field: str) -> Any:
        self.seen.add(field)
        return getattr(self.inst, field)


def _check_modifiers(record: Any, name: str, at: int) -> None:
    """Unknown for a modifier of an operation that takes no notice of it (cpp/operands.h)."""
    for field, taken in TAKEN.items():
        if record[field] not in (0, -1) and not re.search(taken, name):
            raise Unknown(f"{name} with {field} at {at:#x}")
    if record["dpp"] >= 0 and re.search(NO_DPP, name):
        raise Unknown(f"{name} with DPP at {at:#x}")


def _has(inst: Any, field: str) -> bool:
    return any(name == field for name, _ in inst._fields)


def signed(value: int, bits: int) -> int:
    return (value & (1 << bits) - 1) - ((value >> bits - 1 & 1) << bits)


def _scalar(record: Any, inst: Any, name: str) -> None:
    for k, field in enumerate(("ssrc0", "ssrc1")):
        if _has(inst, field):
            record["src"][k] = getattr(inst, field).offset
    if _has(inst, "sdst"):
        record["dst"] = inst.sdst.offset
    if _has(inst, "simm16"):
        record["offset"] = inst.simm16


def _scalar_memory(record: Any, inst: Any, name: str) -> None:
    record["dst"], record["src"][0] = inst.sdata.offset, inst.sbase.offset
    if inst.imm:
        record["offset"] = signed(inst.offset, 21)
    if inst.soffset_en:
        record["src"][1] = inst.soffset.offset
    elif not inst.imm and name.startswith("S_LOAD"):
        raise Unknown(f"{name} whose offset is a register of the old form")


def _vector(record: Any, inst: Any, name: str) -> None:
    """VOP1, VOP2, VOPC, VOP3 and what DPP and SDWA make of them."""
    kind = type(inst.inst).__name__
    dpp, sdwa = "DPP" in kind, "SDWA" in kind
    first = "vsrc0" if dpp or sdwa else "src0"
    record["src"][0] = getattr(inst, first).offset
    second = "src1" if _has(inst, "src1") else "vsrc1"
    if _has(inst, second):
        record["src"][1] = getattr(inst, second).offset
    if _has(inst, "src2"):
        record["src"][2] = inst.src2.offset
    elif name in READS_VCC:
        record["src"][2] = VCC
    if kind.startswith("VOPC") or kind == "VOP3_SDST":
        record["sdst"] = _mask_of(inst, kind)
    else:
        record["dst"] = inst.vdst.offset - (VECTOR if name in TO_SCALAR else 0)
        record["sdst"] = inst.sdst.offset if _has(inst, "sdst") else VCC
    if name in ADDS_TO_ITS_RESULT:
        record["src"][2] = record["dst"]
    if name == "V_FMAMK_F32":
        record["src"][1:] = LITERAL, record["src"][1]
    if name == "V_FMAAK_F32":
        record["src"][2] = LITERAL
    for field in ("neg", "abs", "opsel"):
        if _has(inst, field):
            record[field] = getattr(inst, field)
    if dpp or sdwa:
        for field in ("neg", "abs"):
            both = [getattr(inst, f"src{k}_{field}") for k in (0, 1)]
            record[field] = both[0] | both[1] << 1
    if dpp:
        record["dpp"], record["bound"] = inst.dpp, inst.bc
        record["row_mask"], record["bank_mask"] = inst.row_mask, inst.bank_mask
    if sdwa:
        _sub_dword(record, inst, kind)


def _mask_of(inst: Any, kind: str) -> int:
    if kind == "VOP3_SDST":
        return inst.vdst.offset
    if "SDWA" in kind and inst.sd:
        return inst.sdst.offset
    return VCC


def _sub_dword(record: Any, inst: Any, kind: str) -> None:
    record["sdwa"] = 1
    record["dst_sel"] = inst.dst_sel if _has(inst, "dst_sel") else 6
    record["dst_unused"] = inst.dst_unused if _has(inst, "dst_unused") else 0
    for k in (0, 1):
        record["sel"][k], record["sext"][k] = (getattr(inst, f"src{k}_sel"), getattr(inst, f"src{k}_sext"))
        if getattr(inst, f"s{k}"):  # an SGPR where the field is of a VGPR
            record["src"][k] -= VECTOR


def _packed(record: Any, inst: Any, name: str) -> None:
    for k, field in enumerate(("src0", "src1", "src2")):
        record["src"][k] = getattr(inst, field).offset
    record["dst"] = inst.vdst.offset
    record["neg"], record["neg_hi"], record["opsel"] = inst.neg, inst.neg_hi, inst.opsel
    record["opsel_hi"] = inst.opsel_hi | inst.opsel_hi2 << 2
    if name in ("V_ACCVGPR_READ", "V_ACCVGPR_WRITE"):
        record["neg"] = record["opsel"] = 0
        if name == "V_ACCVGPR_READ":
            record["src"][0] += ACCUMULATOR - VECTOR
        else:
            record["dst"] += ACCUMULATOR - VECTOR


def _matrix(record: Any, inst: Any, name: str) -> None:
    for k, field in enumerate(("src0", "src1", "src2")):
        code = getattr(inst, field).offset
        accumulates = inst.acc_cd if k == 2 else inst.acc >> k & 1
        record["src"][k] = code + (ACCUMULATOR - VECTOR if accumulates and code >= VECTOR else 0)
    record["dst"] = inst.vdst.offset + (ACCUMULATOR - VECTOR if inst.acc_cd else 0)


def _accumulator_move(record: Any, inst: Any, name: str) -> None:
    record["dst"], record["src"][0] = inst.vdst.offset, inst.src0.offset
    record["dst"] += ACCUMULATOR - VECTOR
    record["src"][0] += ACCUMULATOR - VECTOR


def _vector_1(record: Any, inst: Any, name: str) -> None:
    (_accumulator_move if name == "V_ACCVGPR_MOV_B32" else _vector)(record, inst, name)


def _place(record: Any, inst: Any, name: str, data: str) -> None:
    """Scope, data and result of a vector memory instruction."""
    shift = ACCUMULATOR - VECTOR if inst.acc else 0
    record["scope"] = inst.sc0 | inst.sc1 << 1
    record["data"] = getattr(inst, data).offset + shift
    record["dst"] = getattr(inst, "vdata" if data == "vdata" else "vdst").offset + shift
    if "ATOMIC" in name and inst.sc0:
        record["flags"] |= RETURNS


def _global(record: Any, inst: Any, name: str) -> None:
    _place(record, inst, name, "data")
    record["addr"], record["offset"] = inst.addr.offset, signed(inst.offset, 13)
    record["saddr"] = inst.saddr.offset if inst.saddr.offset < OFF else -1


def _buffer(record: Any, inst: Any, name: str) -> None:
    _place(record, inst, name, "vdata")
    record["flags"] |= OFFEN * inst.offen | IDXEN * inst.idxen
    addr = inst.vaddr.offset
    record["addr"] = addr if inst.offen or inst.idxen else -1
    record["src"][1:] = inst.srsrc.offset, inst.soffset.offset
    record["offset"] = inst.offset


def _lds(record: Any, inst: Any, name: str) -> None:
    shift = ACCUMULATOR - VECTOR if inst.acc else 0
    record["addr"], record["data"] = inst.addr.offset, inst.data0.offset + shift
    record["src"][1], record["dst"] = inst.data1.offset + shift, inst.vdst.offset + shift
    record["offset"], record["offset1"] = inst.offset0, inst.offset1


FILL = {
    "SOP": _scalar,
    "SMEM": _scalar_memory,
    "VOP3P_MFMA": _matrix,
    "VOP3P": _packed,
    "VOP1": _vector_1,
    "VOP": _vector,
    "GLOBAL": _global,
    "MUBUF": _buffer,
    "DS": _lds,
}
