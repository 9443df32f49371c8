"""Grids and shapes whose HIP kernels are other code: the executor runs grids that divide nothing, and knows every
instruction of every named shape's."""

from dataclasses import replace
from pathlib import Path

import pytest

from kog_triton.backends.hip.layout import STATIC_BYTES
from kog_triton.model.shapes import SHAPES
from kog_triton.schedule.lowering import matrix_stages
from tests.lib.gfx942 import hip_columns, hip_kernel
from tests.lib.gfx942.executor import WEAK
from tests.lib.gfx942.hip_gates import amiss, keeps_its_promises, keeps_to, made
from tests.lib.gfx942.hip_kernel import INCLUDES, HipWalk
from tests.lib.gfx942.hip_mutants import MANY, MANY_ASKED
from tests.lib.gfx942.hip_requests import CONDITIONS, FINISHED, most_steps, wrong
from tests.lib.gfx942.requests import ASKED, reference_tokens
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.real_shapes import real_shape
from tests.lib.slow import some_always
from tests.lib.triton_cases import plain

CONTEXT = 4096
# Width, and what is short where products and quotients have few bits; 304: a block for each CU of an MI300X.
GRIDS = {7: (640, {"V_MAD_LEGACY_U16", "V_CMP_LT_I16"}), 33: (640, {"V_MIN_U16", "V_CMP_LT_I16"}), 304: (2432, set())}


@pytest.mark.parametrize("num_blocks", some_always(GRIDS, 33))
def test_a_grid_gives_the_references_tokens(num_blocks):
    width, short = GRIDS[num_blocks]
    spec, asked = MANY.replace(hidden_size=width), MANY_ASKED["many"]
    one = HipWalk(spec, ArrayWeights(spec), num_blocks)
    assert one.layout.lowering.num_blocks == num_blocks
    keeps_its_promises(one.layout)
    one.conditions = {"steps": most_steps(num_blocks), "memory": WEAK}
    tokens = reference_tokens(spec, asked)[:3]
    assert one.generate(list(asked.prompt), 3, asked.params, (), 1) == (tokens, FINISHED)
    ran = {m for m, n in zip(one.kernel.mnemonics(), one.last.executed, strict=True) if n}
    assert ran >= short


WIDE_SPEC = plain(1, hidden_size=512, intermediate_size=4096)
# Of LDS that has so much for inputs beside the sums: units of a batch of each stage whose inputs run on over the sums.
OUTGROWN = {
    2048: {"down_proj": 10},  # batches of a token are odd in number: each stage follows on both buffers
    1024: {"qkv_proj": 15, "gate_up_proj": 15, "down_proj": 9, "lm_head": 15},
}


def outgrown(scratch: int, includes: tuple[Path, ...] = INCLUDES) -> HipWalk:
    free = hip_kernel.layout_of(WIDE_SPEC, 4)
    room = STATIC_BYTES + free.partial_bytes + free.small_bytes + scratch
    gpu = replace(free.lowering.gpu, shared_bytes=room)
    return HipWalk(WIDE_SPEC, ArrayWeights(WIDE_SPEC), 4, includes=includes, gpu=gpu)


@pytest.mark.parametrize("scratch", some_always(OUTGROWN, 2048))
def test_inputs_that_run_on_over_partial_sums(scratch):
    one, tokens = outgrown(scratch), reference_tokens(WIDE_SPEC, ASKED["sampled"])
    stages = matrix_stages(one.layout.lowering.schedule)
    behind = {s.name: one.layout.units_behind(s) for s in stages}
    assert {name: units for name, units in behind.items() if units} == OUTGROWN[scratch]
    for conditions in CONDITIONS.values():
        assert wrong(one, "sampled", tokens, conditions, 1) == ""


@pytest.mark.slow
@pytest.mark.parametrize(("header", "scratch"), [("inputs.h", 1024), ("rows.h", 2048)])
def test_sums_that_are_still_added_are_seen(header, scratch, tmp_path):
    """Without the barrier ahead of such inputs, and without the one behind such a stage's sums."""
    text, old = (INCLUDES[1] / "kog" / header).read_text(), "(kOverSums<Stage>) sync_consumers();"
    assert text.count(old) == 1
    (tmp_path / "kog").mkdir()
    (tmp_path / "kog" / header).write_text(text.replace(old, "(kOverSums<Stage>) {}"))
    one = outgrown(scratch, (tmp_path, *INCLUDES))
    assert "a race for byte" in wrong(one, "sampled", [], CONDITIONS["plain"], 1)


# Of these gfx942 has no room for several tokens: x in LDS (the two widest), or operands in registers.
NO_COLUMNS = {"llama-3.3-70b", "mistral-large-123b", "qwen2.5-7b", "llama-2-7b"}


# Bytes of scratch memory of a kernel of one token, by GPUs: addresses that are looked at once a launch or token, of
# models that are too wide for all that a thread holds beside. On one GPU the widest wants an MI325X's memory.
SCRATCH = {("mistral-large-123b", 1): 8, ("mistral-large-123b", 8): 72, ("llama-3.3-70b", 8): 44}
OF_RANKS = [
    (name, ranks)
    for name in ("laneformer-2b", "llama-3.1-8b", "qwen3-32b", "llama-3.3-70b", "mistral-large-123b")
    for ranks in (2, 4, 8)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [*((name, 1) for name in SHAPES), *OF_RANKS])
def test_every_instruction_of_a_named_shape_is_known(name, ranks):
    layout = hip_kernel.layout_of(real_shape(name), max_context=CONTEXT, ranks=ranks)
    if scratch := SCRATCH.get((name, ranks), 0):
        assert made(layout)[0].kernels[hip_kernel.KERNEL][".private_segment_fixed_size"] == scratch
        assert amiss(*made(layout)) == []
    else:
        keeps_to(layout)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_instruction_of_a_named_shapes_columns_is_known(name, chunk):
    layout = hip_columns.most_columns(name, CONTEXT, chunk)
    assert (layout is None) == (name in NO_COLUMNS)
    if layout is not None:
        keeps_to(layout)
