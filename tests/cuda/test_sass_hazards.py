"""No kernel of ours reads a register before its zero is there; code that does is found."""

import pytest

from kog_triton.backends.cuda.layout.columns import lay_out_columns
from tests.lib.cuda_walk import layout_of
from tests.lib.machine_code import SHAPES, one_always, sass_of, spec_named
from tests.lib.sass_hazards import Instruction, instructions, read_too_early

# Of a kernel that loaded from address 0 where P4 was false, and the cycle counts of its encodings.
LOADED_NULL = (
    (0x115B0, "", "CS2R R54, SRZ", 2),
    (0x115C0, "@!P4 ", "IMAD.WIDE R54, R57, 0x4, R52", 1),
    (0x115D0, "@!P3 ", "LDC.64 R18, c[0x0][0x248]", 2),
    (0x115E0, "", "ISETP.NE.U32.AND P4, PT, R54, RZ, PT", 4),
    (0x115F0, "", "ISETP.NE.AND.EX P4, PT, R55, RZ, PT, P4", 2),
    (0x11690, "@P4 ", "LDG.E.STRONG.GPU R64, desc[UR8][R54.64]", 1),
)


def dump(lines):
    """As cuobjdump prints them, the encoding's other bits zero."""
    low = "0" * 16
    return "".join(
        f"        /*{at:04x}*/    {predicate}{text} ;  /* 0x{low} */\n"
        f"                         /* 0x{cycles << 41:016x} */\n"
        for at, predicate, text, cycles in lines
    )


def test_a_zero_read_too_early_is_found():
    assert read_too_early(instructions(dump(LOADED_NULL))) == [(0x115B0, 0x115E0, 5)]


@pytest.mark.parametrize(
    "change",
    [
        (2, (0x115D0, "@!P3 ", "LDC.64 R18, c[0x0][0x248]", 4)),  # late enough
        (1, (0x115C0, "", "IMAD.WIDE R54, R57, 0x4, R52", 1)),  # another value, whatever P4
        (3, (0x115E0, "", "EXIT", 5)),  # nobody reads it
    ],
)
def test_code_that_is_right_is_not_accused(change):
    lines = list(LOADED_NULL)
    lines[change[0]] = change[1]
    assert read_too_early(instructions(dump(lines))) == []


@pytest.mark.parametrize(
    "reader",
    [
        "STS.128 [R2], R52",
        "HMMA.16816.F32 R52, R4, R8, R52",
        "IMAD.WIDE R2, R3, 0x4, R53",
        "LDG.E R2, desc[UR8][R54.64]",
    ],
)
def test_a_register_that_is_not_named_is_read_too(reader):
    lines = [(0x10, "", "CS2R R54, SRZ", 2), (0x20, "", reader, 1)]
    assert read_too_early(instructions(dump(lines))) == [(0x10, 0x20, 2)]


def test_an_instruction_is_taken_apart():
    (load,) = instructions(dump([(16, "@P4 ", "LDG.E.128 R8, desc[UR8][R54.64]", 3)]))
    assert load == Instruction(16, True, "LDG.E.128", ("R8", "desc[UR8][R54.64]"), 3)
    assert (load.writes, load.reads) == ({8, 9, 10, 11}, {54, 55})


# Always of the model in which one was found.
@pytest.mark.parametrize("name", ["laneformer-2b", *one_always(s for s in SHAPES if "lane" not in s)])
def test_a_step_of_one_token_has_no_hazard(name):
    # Where a kernel had it: lanes with this context. The others are compiled for other tests as well.
    max_context = 288 if name == "laneformer-2b" else 1024
    code = instructions(sass_of(layout_of(spec_named(name), max_context=max_context)))
    assert len(code) > 5000
    assert read_too_early(code) == []


@pytest.mark.parametrize("name", one_always(["llama-3.2-1b", "laneformer-2b"]))
def test_a_step_of_columns_has_no_hazard(name):
    layout = lay_out_columns(layout_of(spec_named(name)).lowering, 1024, 8)
    code = instructions(sass_of(layout, "columns.cu"))
    assert len(code) > 5000
    assert read_too_early(code) == []
