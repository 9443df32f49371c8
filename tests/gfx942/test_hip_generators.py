"""The HIP kernels by three code generators more than clang-19's own (tests/lib/gfx942/backends.py): each object keeps
what clang-19's does, and runs requests of small models in both memories, with the reference's tokens.
"""

import pytest

from tests.lib.gfx942 import hip_column_requests, hip_columns, hip_kernel, hip_requests
from tests.lib.gfx942.backends import FETCHED, GENERATORS, INSTALLED, WHEELS
from tests.lib.gfx942.hip_gates import amiss, gates, keeps_its_promises, keeps_to, made
from tests.lib.gfx942.hip_requests import CONDITIONS
from tests.lib.gfx942.requests import expected
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.real_shapes import real_shape
from tests.lib.slow import some_always
from tests.lib.wheel_files import Absent

SPILLS = ("llama-3.1-8b", "chunk")  # by code generators that are FETCHED: two VGPRs of 256
COLUMNS = ("llama", "qwen3", "laneformer", "llama of eight")


@pytest.fixture(scope="module", params=some_always(GENERATORS, *INSTALLED))
def compiler(request):
    try:
        if request.param in WHEELS:
            WHEELS[request.param].path()
    except Absent as absent:
        pytest.skip(str(absent))
    return request.param


@pytest.mark.parametrize("case", some_always(CASES, "llama"))
def test_the_kernel_of_one_token(compiler, case):
    one = hip_requests.walk(case, compiler=compiler)
    keeps_its_promises(one.layout, compiler)
    assert amiss(*made(one.layout, compiler)) == []
    for name in ("greedy", "edits"):
        for order in CONDITIONS.values():
            assert hip_requests.wrong(one, name, expected(case, name), order, 1) == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", COLUMNS)
def test_the_kernel_of_columns(compiler, case):
    layout = hip_column_requests.columns(case, compiler=compiler).layout
    keeps_its_promises(layout, compiler)
    assert amiss(*made(layout, compiler)) == []
    for order in CONDITIONS.values():
        assert hip_column_requests.wrong(case, order, compiler=compiler) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["one token", "requests", "chunk"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.1-8b", "laneformer-2b"])
def test_the_kernels_of_full_size(compiler, name, kernel):
    """What they compute is not executed."""
    if kernel == "one token":
        layout = hip_kernel.layout_of(real_shape(name), max_context=4096)
    else:
        layout = hip_columns.most_columns(name, 4096, kernel == "chunk")
    if (name, kernel) == SPILLS and compiler in FETCHED:
        one = gates(layout, compiler)
        assert (one.scratch, one.spilled) == (12, 2) and one.vgprs <= 256 and one.narrow == 0
        assert amiss(*made(layout, compiler)) == []
        return
    keeps_its_promises(layout, compiler)
    keeps_to(layout, compiler)
