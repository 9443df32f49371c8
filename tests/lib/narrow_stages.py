"""Models of narrow weights of every format, and how a backend's stages are judged by what the weights stand for."""

import re
from dataclasses import replace

from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from kog_triton.stage_check import stage_inputs
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.narrow_stream import NarrowWeights, narrow_spec

STAGES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
# Fragments of 32 values of K, as large models have, and of 16.
LARGE = {"hidden_size": 512, "intermediate_size": 640, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64,
         "num_layers": 2, "max_context": 256}  # fmt: skip
SMALL = {"hidden_size": 90, "intermediate_size": 166, "num_heads": 6, "num_kv_heads": 2, "head_dim": 24,
         "num_layers": 2, "max_context": 256, "qkv_bias": True, "o_bias": True, "mlp_bias": True}  # fmt: skip
GROUPED = SMALL | {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16}
# Of as little work as there is for fragments of 32 values and bytes: in down_proj's units a ring slot ends.
FEW = {"hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
       "num_layers": 2}  # fmt: skip
# The same with a part of K for each warp in o_proj and down_proj. In a kernel of columns warps that share a part put
# the same scales to the same place, which a judge of races takes for one.
FEW_APART = FEW | {"intermediate_size": 2048, "num_heads": 16, "head_dim": 128, "num_layers": 1}
AWQ = WeightFormat(Code.UINT4, 1, 128, Scale.F16, Offset.ZERO_POINT)
Q4_1 = WeightFormat(Code.UINT4, 1, 32, Scale.F16, Offset.MINIMUM)
FP8, BF16_SCALES = FORMATS["fp8-block"], replace(FORMATS["fp8-block"], scale=Scale.BF16)
CASES = {
    "fp8 blocks": (FP8, LARGE),
    "fp8 blocks, odd sizes": (FP8, SMALL),
    "fp8 blocks, bf16 scales": (BF16_SCALES, LARGE),
    "fp8 blocks, float16": (FP8, LARGE | {"dtype": DType.F16}),
    "fp8 channels": (FORMATS["fp8-channel"], SMALL),
    "fp8 channels, tied head": (FORMATS["fp8-channel"], LARGE | {"tied_embeddings": True, "head": True}),
    "fp8 tensors": (WeightFormat(Code.E4M3, 0, 0, Scale.BF16), LARGE),
    "fp8 rows g32": (WeightFormat(Code.E4M3, 1, 32, Scale.F16), LARGE | {"intermediate_size": 96 * 5}),
    "fp8 head in blocks": (FP8, LARGE | {"head": True}),
    "int8 channels": (FORMATS["int8-channel"], SMALL),
    "int4 g128": (FORMATS["int4-g128"], LARGE),
    "int4 g128 and head": (FORMATS["int4-g128"], LARGE | {"head": True}),
    "int4 g32, float16": (FORMATS["int4-g32"], LARGE | {"dtype": DType.F16}),
    "int4 g128, zero points": (AWQ, LARGE),
    "int4 g32, zero points, head": (replace(AWQ, group_cols=32), LARGE | {"head": True}),
    "int4 g64, zero points, float16": (replace(AWQ, group_cols=64), LARGE | {"dtype": DType.F16}),
    "int8 g64, zero points": (WeightFormat(Code.INT8, 1, 64, Scale.BF16, Offset.ZERO_POINT), LARGE),
    "int8 blocks, zero points": (WeightFormat(Code.INT8, 128, 128, Scale.F32, Offset.ZERO_POINT), LARGE),
    "int8 g32 and head (Q8_0)": (
        WeightFormat(Code.INT8, 1, 32, Scale.F16),
        LARGE | {"tied_embeddings": True, "head": True},
    ),
    "int4 g32, minimums (Q4_1)": (Q4_1, LARGE | {"head": True}),
    "int4 g32, minimums, odd sizes": (Q4_1, GROUPED),
    "int4 g32, minimums, float16": (Q4_1, LARGE | {"dtype": DType.F16}),
    "mxfp4": (FORMATS["mxfp4"], LARGE),
    "mxfp4, odd sizes": (FORMATS["mxfp4"], GROUPED),
    "mxfp4, float16": (FORMATS["mxfp4"], LARGE | {"dtype": DType.F16}),
    # Of attention's matrices and of the MLP's: what is staged for a layer's wide stages differs.
    "int8 zero points, then int4": (
        (WeightFormat(Code.INT8, 1, 64, Scale.BF16, Offset.ZERO_POINT), FORMATS["int4-g128"]),
        LARGE,
    ),
    # Scales that a fragment's steps share and scales of steps; the second of stages whose padded K differ.
    "mxfp4, then int4 zero points": ((FORMATS["mxfp4"], AWQ), LARGE),
    "int4, then int8 channels": (
        (FORMATS["int4-g128"], FORMATS["int8-channel"]),
        LARGE | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 16},
    ),
    "16 bits, then mxfp4": ((None, FORMATS["mxfp4"]), LARGE),
    "int4, then fp8 blocks": ((AWQ, FP8), LARGE),
}
# Root mean square of a stage's error over its output's. A wide stage's x keeps 16 bits, the others' 8 (11 in float16);
# the outputs of qkv_proj and gate_up_proj are words of as many.
LIMITS = {DType.BF16: 2.5e-3, DType.F16: 7e-4}
# Neither x nor the logits are rounded to 16 bits. Whole numbers of 16 bits a step of K: a fortieth of what bfloat16 is
# off by; a fragment of int4, of four steps: a twentieth.
IN_LOGITS = {Code.E4M3: 1e-5, Code.INT8: 5e-5, Code.UINT4: 1e-4, Code.E2M1: 5e-5}


def inputs(spec, stage, layer):
    return stage_inputs(spec, stage, layer, 2, 0)


def error_of(have, want):
    """Root mean square of the error over that of what is expected."""
    return float((have - want).square().mean().sqrt() / want.square().mean().sqrt())


def spec_of_case(case):
    how, sizes = CASES[case]
    return mixed(how, sizes) if isinstance(how, tuple) else narrow_spec(how, **sizes)


def mixed(how, sizes):
    """With two formats, of attention's matrices and of the others; None for 16 bits."""
    spec = narrow_spec(how[0] or how[1], **sizes)
    in_attention = re.compile(r"\b(q|k|v|o)_proj$")
    formats = ((name, how[not in_attention.search(name)]) for name, _ in spec.narrow)
    return spec.replace(narrow=tuple((name, of) for name, of in formats if of))


def weights_of(case):
    spec = spec_of_case(case)
    return NarrowWeights(spec, ArrayWeights(spec))


def assert_stage_agrees(ours, reference, stage):
    """A stage of a backend on narrow weights, in all layers, with the reference on what they stand for."""
    assert ours.spec.narrow and not reference.spec.narrow
    narrow_head = stage == "lm_head" and "lm_head" in dict(ours.spec.narrow)
    limit = LIMITS[ours.spec.dtype]
    if narrow_head:
        limit = IN_LOGITS[ours.spec.narrow[-1][1].code]
    for layer in range(1 if stage == "lm_head" else ours.spec.num_layers):
        state = inputs(ours.spec, stage, layer)
        expected, got = (b.run_stage(stage, layer, state) for b in (reference, ours))
        for key, want in expected.items():
            assert error_of(got[key].cpu().float(), want) < limit, (layer, key)
