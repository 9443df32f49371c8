"""Narrow weights in the CUDA kernel: its own C++ on a CPU against the reference on the unpacked values."""

import functools
from dataclasses import replace

import pytest

from kog_triton.backends import STAGE_READS, BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.errors import ModelError
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS, Code, Scale, WeightFormat
from kog_triton.stage_check import stage_inputs
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import PROMPTS, request, run
from tests.lib.cuda_walk import ChunkBackend, ColumnBackend, FiberBackend, compile_walk
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.narrow_stream import NarrowWeights, narrow_spec

STAGES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")
# Fragments of 32 values of K, as large models have, and of 16.
LARGE = {"hidden_size": 512, "intermediate_size": 640, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64,
         "num_layers": 2, "max_context": 256}  # fmt: skip
SMALL = {"hidden_size": 90, "intermediate_size": 166, "num_heads": 6, "num_kv_heads": 2, "head_dim": 24,
         "num_layers": 2, "max_context": 256, "qkv_bias": True, "o_bias": True, "mlp_bias": True}  # fmt: skip
FP8, BF16_SCALES = FORMATS["fp8-block"], replace(FORMATS["fp8-block"], scale=Scale.BF16)
CASES = {
    "fp8 blocks": (FP8, LARGE),
    "fp8 blocks, odd sizes": (FP8, SMALL),
    "fp8 blocks, bf16 scales": (BF16_SCALES, LARGE),
    "fp8 blocks, float16": (FP8, LARGE | {"dtype": DType.F16}),
    "fp8 channels": (FORMATS["fp8-channel"], SMALL),
    "fp8 channels, tied head": (
        FORMATS["fp8-channel"],
        LARGE | {"tied_embeddings": True, "head": True},
    ),
    "fp8 tensors": (WeightFormat(Code.E4M3, 0, 0, Scale.BF16), LARGE),
    "fp8 rows g32": (
        WeightFormat(Code.E4M3, 1, 32, Scale.F16),
        LARGE | {"intermediate_size": 96 * 5},
    ),
    "fp8 head in blocks": (FP8, LARGE | {"head": True}),
    "int8 channels": (FORMATS["int8-channel"], SMALL),
    "int4 g128": (FORMATS["int4-g128"], LARGE),
    "int4 g32, float16": (FORMATS["int4-g32"], LARGE | {"dtype": DType.F16}),
}
# Root mean square of a stage's error over its output's. A wide stage's x keeps 16 bits, the others' 8 (11 in float16);
# the outputs of qkv_proj and gate_up_proj are words of as many.
LIMITS = {DType.BF16: 2.5e-3, DType.F16: 7e-4}
IN_LOGITS = 1e-5  # neither x nor the logits are rounded to 16 bits


def inputs(spec, stage, layer):
    return stage_inputs(spec, stage, layer, 2, 0)


def error_of(have, want):
    """Root mean square of the error over that of what is expected."""
    return float((have - want).square().mean().sqrt() / want.square().mean().sqrt())


def weights_of(case):
    how, sizes = CASES[case]
    spec = narrow_spec(how, **sizes)
    return NarrowWeights(spec, ArrayWeights(spec))


@functools.cache
def opened(case):
    """The kernel on narrow weights and the reference on what they stand for."""
    weights = weights_of(case)
    return FiberBackend(weights, BackendOptions(), 3), ReferenceBackend(weights, BackendOptions())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_a_stage_computes_what_the_unpacked_values_say(case, stage):
    ours, reference = opened(case)
    assert ours.spec.narrow and not reference.spec.narrow
    for layer in range(1 if stage == "lm_head" else ours.spec.num_layers):
        state = inputs(ours.spec, stage, layer)
        expected, got = (
            reference.run_stage(stage, layer, state),
            ours.run_stage(stage, layer, state),
        )
        narrow_head = stage == "lm_head" and "lm_head" in dict(ours.spec.narrow)
        limit = IN_LOGITS if narrow_head else LIMITS[ours.spec.dtype]
        for key, want in expected.items():
            assert error_of(got[key], want) < limit, (layer, key)


def test_all_stages_were_judged():
    assert set(STAGES) == STAGE_READS.keys() - {"embed", "attention", "mix"}


COUNT = 4


@functools.cache
def alone(case):
    backend = FiberBackend(weights_of(case), BackendOptions(num_slots=1), 3)
    return [run(backend, request(0, prompt, COUNT))[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("case", "count"),
    [
        ("fp8 blocks", 8),
        ("int4 g128", 8),
        pytest.param("fp8 blocks", 2, marks=pytest.mark.slow),
        pytest.param("fp8 channels", 2, marks=pytest.mark.slow),
        pytest.param("fp8 channels", 8, marks=pytest.mark.slow),
    ],
)
def test_a_request_among_others_has_the_bits_that_it_has_alone(case, count):
    backend = ColumnBackend(weights_of(case), BackendOptions(num_slots=count), 3, counts=(count,))
    served = run(backend, *(request(i, PROMPTS[i], COUNT) for i in range(count)))
    one = FiberBackend(weights_of(case), BackendOptions(num_slots=1), 3)
    for slot, steps in served.items():
        assert steps == alone(case)[slot]
        run(one, request(0, PROMPTS[slot], COUNT))
        rows = len(PROMPTS[slot]) + COUNT - 1
        assert backend.memory.cache[slot][..., :rows, :].equal(one.memory.cache[0][..., :rows, :])


def test_a_prompt_in_chunks_leaves_the_bits_that_tokens_leave():
    prompt, case = [(3 + 7 * i) % 101 for i in range(21)], "fp8 blocks"
    backends = [
        kind(weights_of(case), BackendOptions(), 3) for kind in (ChunkBackend, FiberBackend)
    ]
    steps = [run(backend, request(0, prompt, COUNT)) for backend in backends]
    assert steps[0] == steps[1]
    chunks, tokens = (
        backend.memory.cache[0][..., : len(prompt) + COUNT - 1, :] for backend in backends
    )
    assert chunks.equal(tokens)


def test_a_library_has_no_prompts_of_narrow_weights():
    with pytest.raises(
        ModelError, match="prompts of narrow weights run in the kernel: choose --prefill kernel"
    ):
        FiberBackend(weights_of("fp8 blocks"), BackendOptions(prefill="library"), 3)


# What is planted in narrow.h, the case that must see it, and its text.
PLANTED = {
    "the scale of the next row": (
        "fp8 rows g32",
        "% Weights::kScaleRows;",
        "% Weights::kScaleRows ^ 1;",
    ),
    "the scale of the next granule": (
        "fp8 rows g32",
        ": 0) + granule;",
        ": 0) + (granule + 1) % Weights::kGranules;",
    ),
    "the next code": (
        "fp8 channels",
        "v.w[j + 1] = e4m3_pair(q << 8);",
        "v.w[j + 1] = e4m3_pair(q);",
    ),
    "the nibbles of the next word": (
        "int4 g128",
        "int4_pair(codes.w[at / 4] >> at % 4 * 4)",
        "int4_pair(codes.w[at / 4] >> (at + 1) % 4 * 4)",
    ),
    "int4's zero": ("int4 g128", "kBase | 0x00080008u", "kBase | 0x00070007u"),
    "a row's scale left out": ("fp8 channels", "sum *= of_lane[item.there ? item.row : 0];", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_seen(what, tmp_path):
    case, before, after = PLANTED[what]
    backend = FiberBackend(weights_of(case), BackendOptions(), 3)
    state = inputs(backend.spec, "qkv_proj", 0)
    backend.run_stage("qkv_proj", 0, state)  # loads the kernel
    kernel = backend._kernels[-1]
    include = plant(tmp_path, ("narrow.h", before, after))
    kernel.library = compile_walk(kernel.layout, kernel.flags, include=include)
    expected = opened(case)[1].run_stage("qkv_proj", 0, state)
    got = backend.run_stage("qkv_proj", 0, state)
    assert max(error_of(got[key], want) for key, want in expected.items()) > 0.01
