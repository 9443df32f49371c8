"""Machine code of the CUDA kernels for GPUs that they never ran on, B200 and RTX 5090: it compiles, and little spills.

One shape a target always, the others with the slow tests.
"""

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.prompt_options import prompts_of
from kog_triton.errors import DeviceError, ModelError
from kog_triton.schedule.topology import GPUS
from tests.lib import column_cases, cuda_walk
from tests.lib.machine_code import SHAPES, assert_no_loop_spills, is_local, machine_code, spec_named

# Loads and stores of spilled registers: of the kernel of one token, of those of columns and chunks. For Hopper 48 and
# 80 are allowed. NVRTC 13.0, Llama-3.2-1B: 57 and 60 for sm_100a; for sm_120a, whose ring of four slots gives the
# compiler other loops, 133 and 219. The most of one token has Qwen2.5-Coder-1.5B, 87 and 184, none of them in a loop.
MOST = {"b200": (96, 80), "rtx-5090": (200, 260)}
IN_LOOPS = {"b200": (2, 2), "rtx-5090": (10, 2)}  # of columns: in one that multiplies, in one that polls


def spills(code):
    return len([what for _, what in code if is_local(what)])


def shapes(always):
    return [n if n in always else pytest.param(n, marks=pytest.mark.slow) for n in SHAPES]


@pytest.mark.parametrize("gpu", MOST)
@pytest.mark.parametrize("name", shapes(("llama-3.2-1b",)))
def test_the_kernel_of_one_token_compiles_with_few_spills(gpu, name):
    code = machine_code(cuda_walk.layout_of(spec_named(name), max_context=1024, gpu=gpu))
    assert_no_loop_spills(code)
    assert spills(code) <= MOST[gpu][0]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", MOST)
@pytest.mark.parametrize("chunk", [False, True], ids=["requests", "chunk"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernels_of_columns_compile_with_few_spills(gpu, name, chunk):
    """With as many columns as shared memory has room for."""
    for columns in (8, 4, 2):
        try:
            layout = column_cases.layout_of(spec_named(name), columns, gpu=gpu, chunk=chunk)
            break
        except ModelError:
            assert columns > 2
    code = machine_code(layout, "columns.cu")
    assert_no_loop_spills(code, *IN_LOOPS[gpu])
    assert spills(code) <= MOST[gpu][1]


def test_prompts_go_in_chunks_where_there_is_no_wgmma():
    for wanted in ("auto", "kernel", "decode", "library"):
        options = BackendOptions(prefill=wanted)
        assert prompts_of(GPUS["h100-pcie"], options) == options
        if wanted != "library":
            got = prompts_of(GPUS["b200"], options)
            assert got == BackendOptions(prefill="kernel" if wanted == "auto" else wanted)
    with pytest.raises(DeviceError, match=r"for Hopper GPUs, and b200 is sm_100a: choose --prefill kernel"):
        prompts_of(GPUS["b200"], BackendOptions(prefill="library"))
