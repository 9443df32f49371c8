"""Machine code of the kernels of several columns, of requests and of a prompt's chunk: what spills."""

import re

import pytest

from kog_triton.backends.cuda.layout.columns import lay_out_columns
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.column_cases import layout_of
from tests.lib.machine_code import SHAPES, assert_no_loop_spills, is_local, machine_code, one_always, spec_named
from tests.lib.real_shapes import real_shape

# Loads and stores: of the walk between loops, of the thread that fills the ring between runs of a stage, and of
# the head once a step. Registers that are kept throughout a layer for nobody double them.
MOST_SPILLS = 80


@pytest.mark.parametrize("chunk", [False, True], ids=["requests", "chunk"])
@pytest.mark.parametrize("name", one_always(SHAPES))
def test_no_loop_that_streams_or_waits_spills(name, chunk):
    """On an H200, 8 requests of Llama-3.2-1B got 13 % more tokens/s once sums, marks, weights that wait and the
    ring's places were in registers; a step of 8 of Qwen3-0.6B took 670 us for 745 with 76
    loads and stores of spilled registers for 158."""
    spec = spec_named(name)
    code = machine_code(layout_of(spec, 8, chunk=chunk), "columns.cu")
    # Where lanes' outputs of the same layer are joined, a register is missing.
    assert_no_loop_spills(code, in_polls=1 if spec.num_lanes > 1 else 0)
    assert len([what for _, what in code if is_local(what)]) <= MOST_SPILLS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "chunk"),
    [("llama-3.2-1b", 2, False), ("llama-3.2-1b", 2, True), ("qwen3-8b", 4, False), ("llama-3.2-1b", 8, False),
     ("laneformer-2b", 2, False), ("laneformer-2b", 8, False)],
)  # fmt: skip
def test_kernels_of_ranks_spill_no_more_and_ask_at_system_scope(name, ranks, chunk):
    lowering = lower(build(spec_named(name), ranks), GPUS["h200"])
    code = machine_code(lay_out_columns(lowering, 1024, 8, chunk), "columns.cu")
    # One where ranks' outputs are joined, as lanes' are.
    assert_no_loop_spills(code, in_polls=1)
    words = [what for _, what in code if re.search(r"\b(LDG|STG)\S*STRONG", what)]
    assert len(words) > 100 and all("STRONG.SYS" in what for what in words)
    if ranks == 2:  # four of qwen3-8b take 131, most of them in the walk
        assert len([what for _, what in code if is_local(what)]) <= MOST_SPILLS


@pytest.mark.slow
def test_no_loop_of_two_columns_spills():
    assert_no_loop_spills(machine_code(layout_of(spec_named("qwen3-0.6b"), 2), "columns.cu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "in_weights"),
    # Once a unit of the last one's o_proj, for operands that are held: four registers are missing.
    [("qwen2.5-0.5b", 0), ("llama-3.1-8b", 0), ("qwen2.5-14b", 2)],
)
def test_no_loop_that_picks_or_reads_operands_spills(name, in_weights):
    code = machine_code(layout_of(real_shape(name), 8), "columns.cu")
    assert_no_loop_spills(code, in_weights)
