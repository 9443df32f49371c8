"""Distances that the hardware does not keep by itself: each is asked for.

That our objects keep them on every way through their code is asked where registers in flight are (test_in_flight.py).
"""

import functools

import pytest

from kog_triton.backends.cuda.layout.header import render
from tests.lib.gfx942 import clang, hip_columns
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.gfx942.triton_cases import ALL as MODELS
from tests.lib.gfx942.wait_states import Unlisted, too_soon

MULTIPLIES = "v_mfma_f32_16x16x16_f16 v[16:19], v[8:9], v[10:11], v[20:23]"
WIDER = "v_mfma_f32_32x32x8_f16 v[32:47], v[8:9], v[10:11], v[48:63]"
# Wait states, what comes first, and what has to come so much later.
DISTANCES = [
    (5, "v_readfirstlane_b32 s20, v1", "global_load_dword v16, v1, s[20:21]"),
    (5, "v_cmp_eq_u32 s[20:21], v1, v1", "buffer_load_dword v16, v1, s[20:23], 0 offen"),
    (4, "v_readlane_b32 s20, v1, 3", "v_readlane_b32 s8, v2, s20"),
    (4, "v_add_co_u32 v16, s[20:21], v1, v1", "v_writelane_b32 v17, 3, s20"),
    (4, "v_div_scale_f32 v16, vcc, v20, v20, v20", "v_div_fmas_f32 v17, v20, v20, v20"),
    (2, "v_readfirstlane_b32 s20, v1", "v_add_u32 v16, s20, v1"),
    (2, "v_cmp_eq_u32 vcc, v1, v1", "v_cndmask_b32 v16, v1, v1, vcc"),
    (2, "v_mad_u64_u32 v[16:17], vcc, v1, v1, 0", "v_addc_co_u32 v18, vcc, v1, v1, vcc"),
    (2, "v_add_u32 v16, v1, v1", "v_mov_b32_dpp v17, v16 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"),
    (2, "v_add_u32 v8, v1, v1", MULTIPLIES),
    (1, "v_add_u32 v16, v1, v1", "v_readlane_b32 s20, v16, 3"),
    (1, "v_writelane_b32 v16, s8, 5", "v_readfirstlane_b32 s20, v16"),
    (1, "v_exp_f32 v16, v1", "v_add_f32 v17, v16, v1"),
    (1, "v_rsq_f32 v16, v1", "v_fmac_f32 v16, v1, v1"),
    (1, "v_cvt_f16_f32_sdwa v16, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:DWORD", "v_mov_b32 v17, v16"),
    (1, "v_mad_u16 v16, v1, v1, v1 op_sel:[0,0,0,1]", "v_mov_b32 v17, v16"),
    (2, "global_store_dwordx3 v[2:3], v[16:18], off", "v_mov_b32 v18, 0"),
    (2, "buffer_store_dwordx4 v[16:19], v1, s[20:23], 0 offen", "v_mov_b32 v16, 0"),
    (3, "v_dot2_f32_f16 v16, v1, v1, v1", "v_add_f32 v17, v16, v1"),
    (3, "v_dot2_f32_f16 v16, v1, v1, v1", "v_mov_b32 v16, 0"),
    (3, "v_dot2c_f32_f16 v16, v1, v1", "ds_write_b32 v1, v16"),
    (3, "v_dot2_f32_f16 v16, v1, v1, v1", "v_dot2_f32_f16 v17, v16, v1, v1"),
    (7, MULTIPLIES, "v_add_f32 v24, v17, v1"),
    (7, MULTIPLIES, "v_mov_b32 v19, 0"),
    (7, MULTIPLIES, "global_store_dword v[2:3], v16, off"),
    (7, MULTIPLIES, "ds_read_b32 v16, v1"),
    (7, MULTIPLIES, "v_mfma_f32_16x16x16_f16 v[24:27], v[8:9], v[18:19], v[28:31]"),
    (5, MULTIPLIES, "v_mfma_f32_16x16x16_f16 v[24:27], v[8:9], v[10:11], v[18:21]"),
    (3, MULTIPLIES, "v_mov_b32 v23, 0"),
    (11, WIDER, "v_add_f32 v24, v40, v1"),
    (7, WIDER, "v_mov_b32 v50, 0"),
]  # fmt: skip
# Other registers, sums that a matrix instruction goes on with, what the hardware waits for.
FREE = [
    ("v_readfirstlane_b32 s20, v1", "global_load_dword v16, v1, s[22:23]"),
    ("v_readfirstlane_b32 s20, v1", "s_add_u32 s21, s20, 1"),
    ("s_mov_b32 s20, 1", "v_add_u32 v16, s20, v1"),
    ("v_exp_f32 v16, v1", "v_log_f32 v17, v16"),
    ("v_dot2c_f32_f16 v16, v1, v1", "v_dot2c_f32_f16 v16, v2, v2"),
    ("global_store_dwordx2 v[2:3], v[16:17], off", "v_mov_b32 v16, 0"),
    ("buffer_store_dwordx4 v[16:19], v1, s[20:23], s8 offen", "v_mov_b32 v16, 0"),
    (MULTIPLIES, "v_mfma_f32_16x16x16_f16 v[16:19], v[8:9], v[10:11], v[16:19]"),
    (MULTIPLIES, "v_mov_b32 v8, 0"),
    (f"{MULTIPLIES}\\nv_mfma_f32_16x16x16_f16 v[14:17], v[8:9], v[10:11], v[16:19]",
     "v_mfma_f32_16x16x16_f16 v[12:15], v[8:9], v[10:11], v[14:17]"),
]  # fmt: skip
CLOBBERS = ",".join(f'"{r}{k}"' for r in "vs" for k in range(6, 64)) + ',"vcc"'


def kernel(name: str, *code: str) -> str:
    text = "\\n".join(("v_mov_b32 v1, 0", "s_nop 7", *code, "s_nop 7"))
    return (
        f'extern "C" __attribute__((global)) void {name}(int* p) {{ asm volatile("{text}" '
        f':: "{{v[2:3]}}"(p) : "memory", {CLOBBERS}); }}\n'
    )


@functools.cache
def code_object():
    """Of each distance three kernels: a wait state too soon; far enough; so by one way of two. Of others one."""
    text = ""
    for k, (states, first, then) in enumerate(DISTANCES):
        between = [f"s_nop {states - 2}"] if states > 1 else []
        text += kernel(f"soon{k}", first, *between, then)
        text += kernel(f"behind{k}", first, f"s_nop {states - 1}", then)
        text += kernel(f"ways{k}", first, "s_cbranch_scc0 1f", f"s_nop {states}", "1:", then)
    for k, (first, then) in enumerate(FREE):
        text += kernel(f"free{k}", first, then)
    text += kernel("unlisted", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 1), 0")
    return clang.text_object(text, ())


@pytest.mark.parametrize("k", range(len(DISTANCES)), ids=lambda k: ": ".join(DISTANCES[k][1:]))
def test_each_distance_is_asked_for(k):
    states = DISTANCES[k][0]
    (found, *_) = too_soon(code_object(), f"soon{k}")
    assert f"{states - 1} wait states behind" in found and found.endswith(f"of {states}")
    assert too_soon(code_object(), f"behind{k}") == []
    assert bool(too_soon(code_object(), f"ways{k}")) == (states > 1)


@pytest.mark.parametrize("k", range(len(FREE)), ids=lambda k: ": ".join(FREE[k]))
def test_what_needs_no_distance(k):
    assert too_soon(code_object(), f"free{k}") == []


def test_an_instruction_of_which_nothing_is_known_is_refused():
    with pytest.raises(Unlisted, match="s_setreg"):
        too_soon(code_object(), "unlisted")


# ---- seen red ----

PLANTED = {
    # LLVM counts the way on which more weights are asked for, and not the one past that.
    "sums that nobody settles": ('asm volatile("s_nop 6" : "+v"(c.v));', 'asm volatile("" : "+v"(c.v));'),
    # Assembly that reads by DPP what an instruction has just written.
    "a permutation in assembly": (
        "return static_cast<u32>(__builtin_amdgcn_update_dpp(0, static_cast<int>(v), kControl, 0xf, 0xf, true));",
        "u32 o;\n"
        '  asm("v_mov_b32_dpp %0, %1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf" : "=v"(o) : "v"(v));\n'
        "  return o;",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, tmp_path):
    text, (old, new) = (INCLUDES[0] / "kog/ptx.h").read_text(), PLANTED[fault]
    assert text.count(old) == 1
    (tmp_path / "kog").mkdir()
    (tmp_path / "kog/ptx.h").write_text(text.replace(old, new))
    one = MODELS["llama-3.2-1b" if "sums" in fault else "llama"]
    layout = hip_columns.layout_of(one.spec, 2, one.num_blocks, one.max_context)
    found = too_soon(hip_columns.compiled(render(layout), (tmp_path, *INCLUDES)), hip_columns.KERNEL)
    assert any("behind a matrix product" in one if "sums" in fault else "_dpp" in one for one in found)
