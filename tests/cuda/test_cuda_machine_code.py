"""Machine code of the CUDA kernel of one token: what spills, and what waits for the cache too early."""

import re

import pytest

from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.weight_format import FORMATS
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.column_cases import layout_of as layout_of_columns
from tests.lib.cuda_walk import layout_of
from tests.lib.machine_code import (
    SHAPES,
    WEIGHTS,
    assert_no_loop_spills,
    innermost,
    is_local,
    machine_code,
    one_always,
    sass_of,
)
from tests.lib.ring_walker import spec_of
from tests.lib.sass_hazards import Instruction, instructions

MOST_SPILLS = 48  # loads and stores, once a token's included


@pytest.mark.parametrize("name", one_always([*SHAPES, "qwen2.5-0.5b", "odd"]))
def test_no_loop_that_streams_or_waits_spills(name):
    spec = spec_of(hidden_size=54, num_heads=4, head_dim=8) if name == "odd" else named_shape(name)
    assert_no_loop_spills(machine_code(layout_of(spec, max_context=1024)))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("llama-3.2-1b", 2),
        *(pytest.param(n, r, marks=pytest.mark.slow)
          for n in ("llama-3.2-1b", "qwen3-8b", "laneformer-2b") for r in (2, 4, 8)),
    ],
)  # fmt: skip
def test_kernels_of_ranks_spill_no_more_and_ask_at_system_scope(name, ranks):
    lowering = lower(build(named_shape(name), ranks), GPUS["h200"])
    code = machine_code(lay_out(lowering, 1024))
    assert_no_loop_spills(code)
    words = [what for _, what in code if re.search(r"\b(LDG|STG)\S*STRONG", what)]
    assert len(words) > 100 and all("STRONG.SYS" in what for what in words)


def used_too_early(code):
    """Loads of the cache ahead of attention's wait, and what reads them before its first poll."""
    begin = next(n for n, one in enumerate(code) if "LDG.E.NA" in one.opcode)
    found, held = [], {}
    for one in code[begin:]:
        if "STRONG.GPU" in one.opcode:
            return found
        if "LDG.E.NA" in one.opcode:
            held |= dict.fromkeys(one.writes, one)
        else:
            found += [(held[register], one) for register in one.reads & held.keys()]
    raise AssertionError("no poll behind the loads")


def test_a_register_moved_out_of_a_loads_way_is_found():
    load = Instruction(16, True, "LDG.E.NA.128", ("R8", "desc[UR8][R54.64]"), 1)
    move = Instruction(32, False, "MOV", ("R2", "R11"), 1)
    poll = Instruction(48, False, "LDG.E.128.STRONG.GPU", ("R4", "desc[UR8][R12.64]"), 1)
    assert used_too_early([load, move, poll]) == [(load, move)]
    assert used_too_early([load, poll, move]) == []


@pytest.mark.parametrize("name", one_always(["qwen3-0.6b", "llama-3.2-1b", "laneformer-2b"]))
def test_no_wait_for_the_cache_comes_before_the_wait_for_queries(name):
    """A register moved out of a load's way cost 2 us a layer of Qwen3-0.6B on an H200."""
    code = instructions(sass_of(layout_of(named_shape(name), max_context=1024)))
    assert used_too_early(code) == []


@pytest.mark.parametrize("name", one_always(SHAPES))
def test_the_walk_hardly_spills(name):
    """Beside the ring little is left of the L1: on an H200, 50 spilled registers cost 15 % of the speed."""
    code = machine_code(layout_of(named_shape(name), max_context=1024))
    assert len([what for _, what in code if is_local(what)]) <= MOST_SPILLS


@pytest.mark.parametrize("name", one_always(["llama-3.2-1b", "laneformer-2b"]))
def test_the_kernel_of_first_tokens_spills_nothing(name):
    code = machine_code(layout_of(named_shape(name), max_context=1024), "head_steps.cu")
    assert not [what for _, what in code if is_local(what)]
    assert innermost(code, WEIGHTS)


@pytest.mark.parametrize("name", one_always(["llama-3.2-1b", "qwen3-8b"]))
def test_the_kernel_of_first_tokens_of_several_spills_nothing(name):
    code = machine_code(layout_of_columns(named_shape(name), 8), "head_step.cu")
    assert not [what for _, what in code if is_local(what)]
    assert innermost(code, WEIGHTS)


@pytest.mark.parametrize("name", one_always(["laneformer-2b", "qwen3-8b"]))
def test_a_stage_alone_has_the_registers_that_it_has_in_the_walk(name):
    """Or it would be other code, and its time nobody's."""
    code = machine_code(layout_of(named_shape(name), max_context=1024), "stage.cu")
    assert len([what for _, what in code if "USETMAXREG" in what]) == 2
    assert len([what for _, what in code if is_local(what)]) <= MOST_SPILLS


# Integer lane operations of a loop that streams, for eight weights: a multiprocessor issues 64 a clock, in which an
# H200's stream brings 20 weights of 8 bits, 37 of 4.
MOST_LANE_OPERATIONS = {"fp8-block": 14, "int4-g128": 5, "int4-g128-zp": 6, "mxfp4": 10, "q8_0": 8}
# Values of K that a product takes of eight rows: of E2M1 the positive and the negative ones apart.
VALUES_OF_PRODUCT = {"fp8-block": 32, "mxfp4": 32}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama-3.2-1b", "fp8-block"),
        ("llama-3.2-1b", "int4-g128"),
        ("llama-3.2-1b", "mxfp4"),
        *(pytest.param("llama-3.2-1b", how, marks=pytest.mark.slow) for how in ("int4-g128-zp", "q8_0")),
        *(pytest.param("qwen3-8b", how, marks=pytest.mark.slow) for how in ("fp8-block", "int4-g128", "mxfp4")),
    ],
)
def test_unpacking_takes_the_registers_and_operations_that_there_are(name, how):
    layout = layout_of(with_format(named_shape(name), FORMATS[how]), max_context=1024)
    code = machine_code(layout)
    assert_no_loop_spills(code)
    assert len([what for _, what in code if is_local(what)]) <= MOST_SPILLS
    lowering = layout.lowering
    weights = lowering.weights["down_proj"]
    values = lowering.fragments * weights.frag_k * weights.pack  # of a row in a slot
    products = values // VALUES_OF_PRODUCT.get(how, 64)
    kind = r"\bIMMA" if weights.integer else r"\bHMMA"
    loops = [body for body in innermost(code, kind) if any("SYNCS" in what for what in body)]
    streams = [b for b in loops if len([w for w in b if re.search(kind, w)]) == products]
    assert streams
    for body in streams:
        assert len([what for what in body if re.search(WEIGHTS, what)]) == products
        integer = [what for what in body if re.search(r"\b(LOP3|SHF|PRMT|IADD3|LEA)\b", what)]
        assert len(integer) * 8 <= MOST_LANE_OPERATIONS[how] * values // 4  # a thread has a quarter of a row
