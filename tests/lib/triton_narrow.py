"""Models of the narrow formats that the Triton kernel reads, and how its stages are judged."""

from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.narrow_stages import AWQ, LARGE, SMALL, STAGES, error_of, inputs, mixed
from tests.lib.narrow_stream import NarrowWeights

SMALLEST = {"hidden_size": 128, "intermediate_size": 192, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32,
            "num_layers": 1, "max_context": 64}  # fmt: skip
ODD = SMALL | {"hidden_size": 92, "intermediate_size": 164, "num_layers": 1}
LINES = SMALLEST | {"hidden_size": 1024, "intermediate_size": 1536}  # and several tiles of one width
CASES = {
    "fp8 blocks": (FORMATS["fp8-block"], LARGE | {"num_layers": 1}),
    "fp8 blocks, odd sizes": (FORMATS["fp8-block"], ODD),
    "fp8 blocks, float16": (FORMATS["fp8-block"], SMALLEST | {"dtype": DType.F16}),
    "fp8 channels": (FORMATS["fp8-channel"], ODD),
    "fp8 tensors": (WeightFormat(Code.E4M3, 0, 0, Scale.BF16), SMALLEST),
    "int8 channels": (FORMATS["int8-channel"], ODD),
    "int8 channels, lines and tiles": (FORMATS["int8-channel"], LINES),
    "int8 g64, zero points": (WeightFormat(Code.INT8, 1, 64, Scale.BF16, Offset.ZERO_POINT), SMALLEST),
    "int8 g32": (WeightFormat(Code.INT8, 1, 32, Scale.F16), SMALLEST),
    "int4 g128": (FORMATS["int4-g128"], LARGE | {"num_layers": 1}),
    "int4 g32": (FORMATS["int4-g32"], SMALLEST),
    "int4 g128, zero points": (AWQ, LARGE | {"num_layers": 1}),
    "int4 g32, minimums": (FORMATS["q4_1"], SMALLEST),
    "mxfp4": (FORMATS["mxfp4"], SMALLEST),
    "mxfp4, lines and tiles": (FORMATS["mxfp4"], LINES),
    "int8 g32, tied head": (FORMATS["q8_0"], SMALLEST | {"tied_embeddings": True, "head": True}),
    "fp8 blocks and head": (FORMATS["fp8-block"], SMALLEST | {"head": True}),
    "int4 g32, minimums, head": (FORMATS["q4_1"], SMALLEST | {"head": True}),
    # Of attention's matrices, and of the MLP's and the head.
    "int4 g32, then int8 and head": ((FORMATS["q4_0"], FORMATS["q8_0"]), SMALLEST | {"head": True}),
    "16 bits, then mxfp4 and head": ((None, FORMATS["mxfp4"]), SMALLEST | {"head": True}),
    "fp8 blocks, then 16 bits": ((FORMATS["fp8-block"], None), SMALLEST),
}  # fmt: skip


# What meets narrow weights is rounded to float16 before each product, and so is what their stages publish; else to the
# model's type.
NARROW_LIMIT = 1.2e-3
LIMITS = {DType.BF16: 5e-3, DType.F16: 1e-3}


def assert_near(ours, reference, stage):
    state = inputs(ours.spec, stage, 0)
    expected, got = (b.run_stage(stage, 0, state) for b in (reference, ours))
    for key, want in expected.items():
        error = error_of(got[key].cpu().float(), want)
        wide = not ours.tiles.stages[STAGES.index(stage)].is_narrow
        of = LIMITS[ours.spec.dtype]
        assert error < (of if wide else min(of, NARROW_LIMIT)), (stage, key, error)


def weights_of(case, **changes):
    how, sizes = CASES[case]
    formats = how if isinstance(how, tuple) else (how, how)
    spec = mixed(formats, sizes | changes)
    return NarrowWeights(spec, ArrayWeights(spec))
