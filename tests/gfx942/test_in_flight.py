"""A register that a load is to fill is touched by no instruction ahead of the wait: each way is a fault as it runs, and
found on every way that machine code may take (waits.py)."""

import functools
import itertools

import numpy as np
import pytest

from tests.lib.gfx942 import clang, hip_columns, hip_kernel
from tests.lib.gfx942.executor import WEAK, Buffer, Fault, Kernel, Launch
from tests.lib.gfx942.hip_gates import amiss, made
from tests.lib.gfx942.triton_cases import ALL as MODELS
from tests.lib.gfx942.triton_cases import CASES, FULL_OBJECTS, VARIANTS, compiled
from tests.lib.gfx942.waits import touched_early
from tests.lib.slow import some_always

# v[2:3] and s[4:5] are an address, as s[12:15] of a buffer; v1 is 0, an address of LDS.
START = "v_mov_b32 v1, 0; s_mov_b64 s[12:13], s[4:5]; s_movk_i32 s14, 0x100; s_mov_b32 s15, 0; "
LOAD, FROM_LDS = "global_load_dword v9, v[2:3], off", "ds_read_b32 v9, v1"
SCALAR, MASK = "s_load_dword s9, s[4:5], 0x0", "s_load_dwordx2 vcc, s[4:5], 0x0"
OTHER_LANES = f"s_mov_b64 exec, 1; {LOAD}; s_mov_b64 exec, 2"
# What fills a register: what touches it, as operand, result, data, address or mask, or fills it in another order.
TOUCHES = {
    LOAD: """MFMA v[16:19], v[8:9], v[20:21], v[24:27]
MFMA v[16:19], v[20:21], v[8:9], v[24:27]
MFMA v[16:19], v[20:21], v[22:23], v[8:11]
MFMA v[8:11], v[20:21], v[22:23], 0
v_mfma_f32_32x32x8bf16_1k v[16:31], v[8:9], v[20:21], 0
v_add_u32 v16, v9, v1
v_mov_b32 v9, 0
v_mov_b64 v[8:9], 0
v_fma_mixhi_f16 v9, v20, v21, v22
v_readlane_b32 s16, v9, 3
v_readfirstlane_b32 s16, v9
v_writelane_b32 v9, s4, 3
global_store_dwordx4 v[2:3], v[6:9], off
global_atomic_add v[2:3], v9, off
global_atomic_cmpswap v[2:3], v[8:9], off
ds_write_b32 v1, v9
ds_add_u32 v1, v9
global_load_dword v16, v[8:9], off
global_load_dword v16, v9, s[4:5]
ds_read_b32 v16, v9
buffer_load_dword v16, v9, s[12:15], 0 offen
buffer_load_dword v16, v[8:9], s[12:15], 0 idxen offen
buffer_store_dword v1, v9, s[12:15], 0 offen
ds_read_b32 v9, v1
global_load_short_d16 v9, v[2:3], off""",
    "global_load_short_d16 v9, v[2:3], off": "global_load_short_d16_hi v9, v[2:3], off",
    "global_atomic_add v9, v[2:3], v1, off sc0": "v_mov_b32 v16, v9",
    "s_mov_b32 s14, 0; buffer_load_dword v9, v1, s[12:15], 0 offen": "v_mov_b32 v16, v9",
    OTHER_LANES: "MFMA v[16:19], v[8:9], v[20:21], 0",
    "global_load_dword a9, v[2:3], off": """MFMA a[0:3], v[20:21], v[22:23], a[8:11]
MFMA a[8:11], v[20:21], v[22:23], 0
v_accvgpr_read_b32 v16, a9
ds_write_b32 v1, a9
ds_read_b32 a9, v1""",
    FROM_LDS: """MFMA v[16:19], v[20:21], v[8:9], 0
v_mov_b32 v16, v9
global_load_dword v9, v[2:3], off
global_atomic_add v9, v[2:3], v1, off sc0""",
    SCALAR: """s_add_u32 s16, s9, 1
s_mov_b32 s9, 1
s_movk_i32 s9, 1
s_addk_i32 s9, 1
s_cmpk_eq_u32 s9, 1
s_bitset1_b32 s9, 1
s_getreg_b32 s9, hwreg(HW_REG_XCC_ID)
s_getpc_b64 s[8:9]
s_and_saveexec_b64 s[8:9], exec
v_add_u32 v16, s9, v1
v_readlane_b32 s9, v1, 3
v_readfirstlane_b32 s9, v1
v_cmp_eq_u32 s[8:9], v1, v1
v_addc_co_u32 v16, s[16:17], v1, v1, s[8:9]
v_mad_u64_u32 v[16:17], s[8:9], v1, v1, 0
global_load_dword v16, v1, s[8:9]
s_load_dword s16, s[8:9], 0x0
s_load_dword s9, s[4:5], 0x0
s_memtime s[8:9]""",
    "s_memtime s[8:9]": "s_mov_b32 s16, s9",
    "s_load_dword s13, s[4:5], 0x0": "buffer_load_dword v16, v1, s[12:15], 0 offen",
    "s_load_dword s15, s[4:5], 0x0": "buffer_load_dword v16, v1, s[12:15], 0 offen",
    MASK: """v_add_co_u32 v16, vcc, v1, v1
v_cndmask_b32 v16, v1, v1, vcc
v_div_scale_f32 v16, vcc, v20, v20, v20
v_div_fmas_f32 v16, v20, v20, v20
s_cbranch_vccz 0
s_mov_b32 s16, src_vccz""",
}
ALLOWED = {  # other registers, others' lanes, loads that come in order
    LOAD: """MFMA v[4:7], v[12:13], v[14:15], 0
global_load_dword v9, v[2:3], off
global_atomic_add v9, v[2:3], v1, off sc0""",
    FROM_LDS: "ds_read_b32 v9, v1",
    SCALAR: "v_cmp_eq_u32 s[6:7], v1, v1",
    OTHER_LANES: "ds_read_b32 v9, v1\nglobal_atomic_add v[2:3], v9, off",
}


def cases(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(fills, touch) for fills, lines in table.items() for touch in lines.split("\n")]


ALL = cases(TOUCHES) + cases(ALLOWED)
CLOBBERS = ",".join(f'"{r}{k}"' for r in "vas" for k in (1, *range(6, 32))) + ',"vcc","scc"'


@functools.cache
def code_object():
    """Two kernels a case, by its place: early0 without a wait ahead of the touch, awaited0 with one."""
    text = ""
    for k, (fills, touch) in enumerate(ALL):
        for name, wait in (("early", ""), ("awaited", "s_waitcnt 0; ")):
            code = f"{START}{fills}; {wait}{touch}; s_waitcnt 0; s_mov_b64 exec, -1"
            text += f'extern "C" __attribute__((global)) void {name}{k}(int* p) {{ asm volatile("'
            text += code.replace("MFMA", "v_mfma_f32_16x16x16_f16").replace("; ", "\\n")
            text += f'" :: "{{v[2:3]}}"(p), "{{s[4:5]}}"(p) : "memory", {CLOBBERS}); }}\n'
    return clang.text_object(text, ())


def faults(name: str, case: tuple[str, str]) -> bool:
    words = np.zeros(64, np.uint32)
    launch = Launch([words.ctypes.data], (1, 1, 1), (64, 1, 1))
    try:
        Kernel(code_object(), f"{name}{ALL.index(case)}").run(launch, [Buffer(words)], WEAK, lds=256)
    except Fault as fault:  # behind the wait some find that 0 is no address
        return "is touched while a load is to fill it: no wait" in str(fault)
    return False


@pytest.mark.parametrize("case", cases(TOUCHES), ids=": ".join)
def test_no_instruction_touches_a_register_in_flight(case):
    assert faults("early", case) and not faults("awaited", case)


@pytest.mark.parametrize("case", cases(ALLOWED), ids=": ".join)
def test_what_is_in_order_or_in_other_lanes_needs_no_wait(case):
    assert not faults("early", case)


@pytest.mark.parametrize("case", cases(TOUCHES), ids=": ".join)
def test_the_walk_finds_what_the_executor_does(case):
    number = ALL.index(case)
    assert touched_early(code_object(), f"early{number}")
    assert not touched_early(code_object(), f"awaited{number}")


@pytest.mark.parametrize("name", some_always([*CASES, "llama-3.2-1b"], "llama-3.2-1b"))
def test_nothing_is_amiss_on_any_way_through_the_hip_kernels(name):
    one = MODELS[name]
    layout = hip_kernel.layout_of(one.spec, one.num_blocks, one.max_context)
    assert amiss(*made(layout)) == []
    layout = hip_columns.layout_of(one.spec, 2, one.num_blocks, one.max_context)
    assert amiss(*made(layout)) == []


# One token of a model with lanes; the slow tests walk the rest.
WALKED = [("laneformer", "")]


@pytest.mark.parametrize(
    ("name", "variant"), some_always([*itertools.product(CASES, VARIANTS), *FULL_OBJECTS], *WALKED)
)
def test_nothing_is_amiss_on_any_way_through_the_triton_kernel(name, variant):
    one = compiled(name, variant).code_object
    assert [amiss(one, kernel) for kernel in one.kernels] == [[]]
