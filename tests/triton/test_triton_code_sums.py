"""Codes times operands in the Triton kernel, one tile alone: against the values that they stand for, in float64.

Here are the layouts that models of full size have: several lines of a row, groups that end within a thread's run, warps
that share a row.
"""

import os
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch
import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

from kog_triton.backends.triton.kernel import codes as kernel
from kog_triton.backends.triton.kernel.codes import (
    load_parts,
    parts_of,
    split_lines,
    store_parts,
    sums_of_codes,
    with_scales,
)
from kog_triton.backends.triton.kernel.sync import e2m1_text
from kog_triton.model.weight_format import Code
from kog_triton.schedule.topology import SIZES, Sizes
from kog_triton.schedule.triton import StageTiles
from kog_triton.schedule.triton_codes import TileCodes, pack_codes

KINDS = {
    "int4 g32": TileCodes(Code.UINT4, 32, False),
    "int4 g128": TileCodes(Code.UINT4, 128, False),
    "int4 g32, zero points": TileCodes(Code.UINT4, 32, True),
    "int4 g64, zero points": TileCodes(Code.UINT4, 64, True),
    "int8 g32": TileCodes(Code.INT8, 32, False),
    "int8 rows": TileCodes(Code.INT8, 0, False),
    "int8 g32, zero points": TileCodes(Code.INT8, 32, True),
    "int8 rows, zero points": TileCodes(Code.INT8, 0, True),
    "fp8 g32": TileCodes(Code.E4M3, 32, False),
    "fp8 g128": TileCodes(Code.E4M3, 128, False),
    "mxfp4": TileCodes(Code.E2M1, 32, False),
}
CASES = [  # words along K, rows, warps that share a row, dimension of the lines
    (1024, 16, 1, 1),
    (1024, 16, 1, 0),
    (1024, 4, 2, 1),
    (512, 16, 1, 1),
    (1024, 4, 2, 0),
    (128, 8, 1, 1),
]


@dataclass(frozen=True)
class Known:
    vendor: str
    sizes: Sizes


@triton.jit
def multiply(x, w, out, column, S: tl.constexpr, T: tl.constexpr, AXIS: tl.constexpr, COLUMN: tl.constexpr):
    WORDS: tl.constexpr = T.stored_width(0)
    WIDE: tl.constexpr = min(WORDS, 128)
    i = tl.arange(0, T.widths[0] // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
    row, line, word = tl.arange(0, T.tile_rows), tl.arange(0, WORDS // WIDE), tl.arange(0, WIDE)
    if AXIS == 1:
        at = row[:, None, None] * WORDS + line[None, :, None] * WIDE + word[None, None, :]
    else:
        at = row[None, :, None] * WORDS + line[:, None, None] * WIDE + word[None, None, :]
    tile = with_scales(tl.load(w + at), w, S, T, 0)
    operands = parts_of(tl.load(x + i), S, T, 0)
    if COLUMN:
        # As a column in memory, with a copy for every warp that has rows of its own.
        store_parts(column, operands)
        operands = load_parts(column, S, T, 0)
    sums, factor = sums_of_codes(tile, operands, S, T, 0)
    y = sums * factor
    tl.store(out + row, tl.sum(tl.sum(y, axis=2), axis=AXIS))


def drawn(kind, rows, width, seed):
    """Codes, scales and zero points, and the values that they stand for."""
    draw = torch.Generator().manual_seed(seed)
    groups = kind.groups(width)
    codes = torch.randint(0, 16 if kind.pack == 4 else 256, (rows, 2 * width), generator=draw)
    codes = codes.to(torch.uint8)
    if kind.is_e4m3:
        codes[codes & 0x7F == 0x7F] = 1  # NaN
        values = codes.view(torch.float8_e4m3fn).double()
    elif kind.pack == 2:
        values = codes.view(torch.int8).double()
    elif kind.is_e2m1:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[codes.long() & 7]
        values = torch.where(codes > 7, -values, values)
    else:
        values = codes.double()
    scales = torch.rand(rows, groups, generator=draw) + 0.5
    zeros = torch.randint(0, 16, (rows, groups), generator=draw).float() + 0.25
    values = values.view(rows, groups, -1)
    less = zeros.double()[..., None] if kind.zero_points else kind.zero
    values = ((values - less) * scales.double()[..., None]).view(rows, -1)
    beside = [scales, zeros - kind.zero] if kind.zero_points else [scales]
    return [codes[None], *(v.view(torch.uint8)[None] for v in beside)], values


def sums(kind, case, x=None, drawn=drawn, column=False):
    """What the kernel makes of a tile and operands, what is right, and what that could be at most; of operands that
    have been in memory as a `column`'s."""
    width, rows, parts, axis = case
    known = Known("cpu", SIZES["cpu"])
    tiles = StageTiles("one", 0, rows, 2 * width, rows, (width,), 1, False, codes=kind)
    given, values = drawn(kind, rows, width, width + rows)
    packed = pack_codes(kind, given, tiles.tile_shape(0, known.sizes.warps), partial(torch.cat, dim=1))
    if x is None:
        x = torch.randn(2 * width, generator=torch.Generator().manual_seed(1))
    x, out = x.half(), torch.empty(rows)
    words = packed.contiguous().view(torch.int32).reshape(-1)
    room = torch.zeros(tiles.operands, dtype=torch.int32)
    assert split_lines(known, tiles, 0) == parts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "LINES_AXIS", tl.constexpr(axis))
        multiply[(1,)](x.view(torch.int32), words, out, room, known, tiles, axis, column)
    return out.double(), values @ x.double(), values.abs() @ x.double().abs()


def is_right(got, want, most, off=2e-5):
    return bool(((got - want).abs() <= off * most).all())


def limit_of(name):
    """E4M3's products are float16: 2^-12 of each sum."""
    return 2e-4 if KINDS[name].is_e4m3 else 2e-5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KINDS)
def test_a_tile_times_operands_is_right(name, case):
    assert is_right(*sums(KINDS[name], case), limit_of(name))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KINDS)
def test_operands_that_lie_in_memory_make_the_same_bits(name, case):
    kind = KINDS[name]
    assert torch.equal(sums(kind, case, column=True)[0], sums(kind, case)[0])


@pytest.mark.parametrize("case", CASES)
def test_e4m3_is_right_where_no_instruction_makes_float16_of_it(case, monkeypatch):
    monkeypatch.setattr(kernel, "converts_e4m3", no_instruction)
    assert is_right(*sums(KINDS["fp8 g128"], case))


@pytest.mark.parametrize("times", [8192, 2**-12])
def test_operands_of_any_size_are_as_exact(times):
    x = times * torch.randn(2 * CASES[0][0], generator=torch.Generator().manual_seed(2))
    assert is_right(*sums(KINDS["fp8 g128"], CASES[0], x=x), limit_of("fp8 g128"))


def test_the_largest_sums_of_e4m3_stay_within_float16():
    def largest(kind, rows, width, seed):
        (codes, scales), _ = drawn(kind, rows, width, seed)
        each = scales.view(torch.float32)[0].double().repeat_interleave(kind.group, dim=1)
        return [torch.full_like(codes, 0x7E), scales], 448 * each

    x = torch.full((2 * CASES[0][0],), 1.9921875)
    assert is_right(*sums(KINDS["fp8 g128"], CASES[0], x=x, drawn=largest), limit_of("fp8 g128"))


@pytest.mark.parametrize("name", ["int4 g128", "fp8 g128"])
def test_an_operand_that_is_none_is_not_hidden(name):
    x = torch.ones(2 * CASES[0][0])
    x[77] = float("nan")
    assert sums(KINDS[name], CASES[0], x=x)[0].isnan().all()


@triton.jit
def one_run(x, LINES: tl.constexpr):
    return tl.reshape(x, (LINES, x.shape[0] * 4))


@triton.jit
def no_low_byte(a, b, SELECT: tl.constexpr, S: tl.constexpr):
    if SELECT == 0x5410:
        return tl.full(a.shape, -0x7F7F7F80, tl.int32)
    else:
        return BYTES_OF(a, b, SELECT, S)


@triton.constexpr_function
def one_set(T, K):
    return 1


@triton.constexpr_function
def no_instruction(S):
    return False


@triton.jit
def other_half_first(a, b, S: tl.constexpr):
    return ROUNDED_TO_HALVES(b, a, S)


BYTES_OF, ROUNDED_TO_HALVES = kernel.bytes_of, kernel.rounded_to_halves
FAULTS = {
    "a thread's operands are those of a line": ("in_lines", one_run, "int4 g128"),
    "operands without their low bytes": ("bytes_of", no_low_byte, "int4 g128"),
    "one group for all of a run": ("sets_of", one_set, "int4 g32"),
    "operands of the codes beside": ("rounded_to_halves", other_half_first, "fp8 g128"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    function, wrong, name = FAULTS[fault]
    monkeypatch.setattr(kernel, function, wrong)
    assert not is_right(*sums(KINDS[name], CASES[0]), limit_of(name))


def run_ptx(text, word):
    """$0 of such a text for $1: PTX ISA 8.5, sections 9.7.9.7 (prmt) and 9.7.8.5 (lop3)."""
    known = {"$1": word}

    def of(name):
        return known[name] if name in known else int(name, 0)

    def picked(low, high, select):
        table, out = (low | high << 32).to_bytes(8, "little"), 0
        for i in range(4):
            nibble = select >> 4 * i & 15
            byte = table[nibble & 7]
            out |= ((byte >> 7) * 255 if nibble & 8 else byte) << 8 * i
        return out

    run = {
        "shr": lambda a, by: a >> by,
        "shl": lambda a, by: a << by & 0xFFFFFFFF,
        "and": lambda a, b: a & b,
        "prmt": picked,
        "lop3": lambda a, b, c, table: sum(
            (table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)
        ),
    }
    for line in text.strip("{}\n").splitlines()[1:]:  # behind the registers
        name, to, *given = line.rstrip(";").replace(",", "").split()
        known[to] = run[name.removesuffix(".b32")](*map(of, given))
    return known["$0"]


@pytest.mark.parametrize("half", [0, 1])
def test_every_code_of_mxfp4_is_picked_in_every_place(half):
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for code, place, others in product(range(16), range(8), (0, 0x13579BDF, 0xFFFFFFFF)):
        word = others & ~(15 << 4 * place) | code << 4 * place
        codes = [word >> 4 * i & 15 for i in range(4 * half, 4 * half + 4)]
        want = [int(2 * values[c & 7]) * (-1 if c > 7 else 1) for c in codes]
        made = run_ptx(e2m1_text(half), word).to_bytes(4, "little")
        assert [b - 256 * (b > 127) for b in made] == want, hex(word)
