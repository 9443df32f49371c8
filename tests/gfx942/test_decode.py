"""What the executor lacks is refused by name: operations, encodings, and modifiers that nobody would take notice of."""

import pytest
from tinygrad.renderer.amd import decode_inst

from tests.lib.gfx942 import decode
from tests.lib.gfx942.clang import code_object
from tests.lib.gfx942.decode import MOST_BYTES, SHORTEST, Unknown, instructions
from tests.lib.gfx942.executor import Kernel

REFUSED = {
    "v_cvt_off_f32_i4 v0, v1": "V_CVT_OFF_F32_I4",
    "s_setreg_imm32_b32 hwreg(HW_REG_MODE), 3": "S_SETREG_IMM32_B32",
    "flat_load_dword v0, v[2:3]": "FLAT_LOAD_DWORD",
    "scratch_load_dword v0, off, s0": "SCRATCH_LOAD_DWORD",
    "s_dcache_inv": "S_DCACHE_INV",
    "global_load_lds_dword v[0:1], off": "GLOBAL_LOAD_LDS_DWORD",
    "v_add_f32 v0, v1, v2 clamp": "V_ADD_F32 with clmp",
    "v_add_f32 v0, v1, v2 mul:2": "V_ADD_F32 with omod",
    "v_add_f32_sdwa v0, v1, v2 clamp dst_sel:DWORD src0_sel:WORD_1": "V_ADD_F32 with clmp",
    "v_pk_fma_f16 v0, v1, v2, v3 clamp": "V_PK_FMA_F16 with clmp",
    "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] cbsz:1": "V_MFMA_F32_16X16X16_F16 with cbsz",
    "v_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3] blgp:1": "V_MFMA_F32_16X16X16_F16 with blgp",
    "s_load_dword s0, s[2:3], 0x0 glc": "S_LOAD_DWORD with glc",
    "buffer_load_dword off, s[0:3], 0 lds": "BUFFER_LOAD_DWORD with lds",
    "v_addc_co_u32_dpp v0, vcc, v1, v2, vcc row_shr:1": "V_ADDC_CO_U32 with DPP",
    "v_dot2c_f32_f16_dpp v0, v1, v2 row_shr:1": "V_DOT2C_F32_F16 with DPP",
}


@pytest.mark.parametrize("instruction", REFUSED)
def test_what_the_executor_lacks_is_refused_by_name(instruction):
    with pytest.raises(Unknown, match=REFUSED[instruction]):
        Kernel(code_object("refused.hip", f'-DINSTRUCTION="{instruction}"'), "refused")


def test_the_same_without_the_modifier_is_taken():
    for instruction in ("v_add_f32 v0, v1, v2", "v_addc_co_u32 v0, vcc, v1, v2, vcc", "ds_read_b32 v0, v1"):
        Kernel(code_object("refused.hip", f'-DINSTRUCTION="{instruction}"'), "refused")


def test_what_is_decoded_once_is_what_the_decoder_gives_each_time(monkeypatch):
    """And an instruction as long as no other of the same first word is no fault that passes."""
    made = code_object("pointers.hip")
    for name in made.kernels:
        _, code = made.code(name)
        for _ in range(2):
            for at, inst in instructions(code):
                anew = decode_inst(code[at : at + MOST_BYTES].ljust(MOST_BYTES, b"\0"), "cdna")
                assert (type(inst), inst.to_bytes()) == (type(anew), anew.to_bytes())
    monkeypatch.setattr(decode, "_decoded", {})
    monkeypatch.setattr(decode, "_begins", {code[:SHORTEST]: MOST_BYTES})
    with pytest.raises(AssertionError, match="does not say how long it is"):
        instructions(code)
