"""Grids and shapes whose HIP kernels are other code: the executor runs grids that divide nothing, and knows every
instruction of every named shape's."""

import pytest

from kog_triton.backends.hip.column_layout import ColumnLayout
from kog_triton.errors import ModelError
from kog_triton.model.shapes import SHAPES
from tests.lib.gfx942 import hip_columns, hip_kernel
from tests.lib.gfx942.executor import WEAK
from tests.lib.gfx942.hip_gates import keeps_its_promises, keeps_to
from tests.lib.gfx942.hip_kernel import HipWalk
from tests.lib.gfx942.hip_mutants import MANY, MANY_ASKED
from tests.lib.gfx942.hip_requests import FINISHED, most_steps
from tests.lib.gfx942.requests import reference_tokens
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.real_shapes import real_shape
from tests.lib.slow import some_always

CONTEXT = 4096
# Width, and what is short where products and quotients have few bits; 304: a block for each CU of an MI300X.
GRIDS = {
    7: (640, {"V_MAD_LEGACY_U16", "V_CMP_LT_I16"}),
    33: (640, {"V_MIN_U16", "V_CMP_LT_I16"}),
    304: (2432, set()),
}


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


# Of gfx942's memory a model of these is too large: activations for LDS, or a column's operands for registers.
REFUSED = {"llama-3.3-70b", "mistral-large-123b", "qwen3-32b"}
NO_COLUMNS = {"llama-3.3-70b", "mistral-large-123b", "qwen2.5-7b", "llama-2-7b"}


def most_columns(name: str, chunk: bool) -> ColumnLayout | None:
    for count in (8, 4, 2):
        try:
            return hip_columns.layout_of(real_shape(name), count, 0, CONTEXT, chunk)
        except ModelError:
            continue
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_instruction_of_a_named_shape_is_known(name):
    if name in REFUSED:
        with pytest.raises(ModelError, match="bytes of LDS: mi300x has"):
            hip_kernel.layout_of(real_shape(name), max_context=CONTEXT)
        return
    keeps_to(hip_kernel.layout_of(real_shape(name), max_context=CONTEXT))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_every_instruction_of_a_named_shapes_columns_is_known(name, chunk):
    layout = most_columns(name, chunk)
    assert (layout is None) == (name in NO_COLUMNS)
    if layout is not None:
        keeps_to(layout)
