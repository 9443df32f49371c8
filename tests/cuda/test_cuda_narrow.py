"""Narrow weights in the CUDA kernel: its own C++ on a CPU against the reference on the unpacked values."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kog_triton.backends import STAGE_READS, BackendOptions
from kog_triton.backends.cuda.layout import batches
from kog_triton.backends.cuda.layout.columns import lay_out_columns
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.bench.kl_limit import UNPACKED
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.weight_format import FORMATS, Code
from kog_triton.sampling import SamplingParams
from kog_triton.schedule.cuda import STREAM_WINDOW_BYTES, WARPS, lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import PROMPTS, request, run
from tests.lib.cuda_walk import ChunkBackend, ColumnBackend, FiberBackend, compile_walk
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.narrow_stages import (
    AWQ,
    CASES,
    LARGE,
    LIMITS,
    STAGES,
    assert_stage_agrees,
    error_of,
    inputs,
    spec_of_case,
    weights_of,
)
from tests.lib.narrow_stream import NarrowWeights, narrow_spec

# Judged by the slow tests: others have the same code with other numbers.
RARE = {
    "int4 g32, zero points, head",
    "int4 g64, zero points, float16",
    "int8 g32 and head (Q8_0)",
    "int4 g32, minimums, odd sizes",
    "int4 g32, minimums, float16",
    "mxfp4, odd sizes",
    "mxfp4, float16",
    "16 bits, then mxfp4",
    "int4, then fp8 blocks",
}


@functools.cache
def opened(case):
    """The kernel on narrow weights and the reference on what they stand for."""
    weights = weights_of(case)
    return FiberBackend(weights, BackendOptions(), 3), ReferenceBackend(weights, BackendOptions())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in RARE else c for c in CASES])
def test_a_stage_computes_what_the_unpacked_values_say(case, stage):
    assert_stage_agrees(*opened(case), stage)


FIVE = LARGE | {"hidden_size": 1280, "intermediate_size": 256, "head_dim": 16, "num_layers": 1}


def five_fragments(how):
    """Weights whose units of gate_up_proj are five fragments: two of them end with a ring slot, one does not."""
    spec = narrow_spec(FORMATS[how], **FIVE)
    for blocks in (3, SHARING):
        lowering = lower(build(spec), GPUS["h200"], blocks)
        stage = lowering.schedule.stage("gate_up_proj")
        assert (lowering.unit_fragments(stage), lowering.fragments) == (5, 2)
    return NarrowWeights(spec, ArrayWeights(spec))


@pytest.mark.parametrize("how", ["fp8-block", "int4-g128"])
def test_units_that_end_within_a_ring_slot(how):
    weights = five_fragments(how)
    ours = FiberBackend(weights, BackendOptions(), 3)
    for stage in ("qkv_proj", "gate_up_proj"):
        assert_stage_agrees(ours, ReferenceBackend(weights, BackendOptions()), stage)


@pytest.mark.parametrize(("how", "count"), [("int4-g128", 2), pytest.param("fp8-block", 8, marks=pytest.mark.slow)])
def test_such_units_of_requests_among_others(how, count):
    weights = five_fragments(how)
    backend = ColumnBackend(weights, BackendOptions(num_slots=count), SHARING, counts=(count,))
    served = shared(backend, *(request(i, PROMPTS[i], COUNT) for i in range(count)))
    one = FiberBackend(weights, BackendOptions(num_slots=1), SHARING)
    for slot, steps in served.items():
        assert steps == run(one, request(0, PROMPTS[slot], COUNT))[0]


LONG = {"int4-g128": 5, "fp8-block": 9}  # fragments of a unit of down_proj, which ends within a ring slot


def long_units(how, blocks):
    """Weights whose units of down_proj have loops of their own; their lowering and that stage."""
    inputs = WARPS * LONG[how] * {"int4-g128": 128, "fp8-block": 64}[how]
    sizes = {"hidden_size": 128, "intermediate_size": inputs, "head_dim": 16}
    spec = narrow_spec(FORMATS[how], **LARGE | sizes)
    lowering = lower(build(spec), GPUS["h200"], blocks)
    stage = lowering.schedule.stage("down_proj")
    assert lowering.long_units(stage) and lowering.unit_fragments(stage) == LONG[how]
    return NarrowWeights(spec, ArrayWeights(spec)), lowering, stage


@pytest.mark.parametrize("how", LONG)
def test_units_too_long_to_be_laid_out(how):
    weights, lowering, stage = long_units(how, 3)
    first, last = lowering.unit_bounds(stage, 0, np.arange(3))
    assert sorted(last - first) == [5, 5, 6]  # a period begun and not ended, too
    ours = FiberBackend(weights, BackendOptions(), 3)
    assert_stage_agrees(ours, ReferenceBackend(weights, BackendOptions()), "down_proj")


@pytest.mark.parametrize(
    ("how", "count", "room"),
    [
        pytest.param("int4-g128", 2, 0, marks=pytest.mark.slow),
        ("int4-g128", 2, 20_000),
        pytest.param("int4-g128", 8, 70_000, marks=pytest.mark.slow),
        pytest.param("int4-g128", 8, 50_000, marks=pytest.mark.slow),
        pytest.param("fp8-block", 8, 50_000, marks=pytest.mark.slow),
        pytest.param("fp8-block", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_long_units_of_requests_among_others(how, count, room, monkeypatch):
    """With operands in registers and in scratch, and where that has no room for all, in memory."""
    weights, lowering, stage = long_units(how, SHARING)
    if room:
        monkeypatch.setattr(batches, "scratch_room", lambda lowering: room)
    assert bool(batches.read_steps(lowering, stage, count)) == bool(room)
    backend = ColumnBackend(weights, BackendOptions(num_slots=count), SHARING, counts=(count,))
    served = shared(backend, *(request(i, PROMPTS[i], COUNT) for i in range(count)))
    one = FiberBackend(weights, BackendOptions(num_slots=1), SHARING)
    for slot, steps in served.items():
        assert steps == run(one, request(0, PROMPTS[slot], COUNT))[0]


class FarthestWeights(NarrowWeights):
    """Every code as low as there is, and every zero point as high."""

    def stored(self, name):
        stored = super().stored(name)
        low, high = (-128, 127) if stored.format.code is Code.INT8 else (0, 15)
        codes, points = torch.full_like(stored.codes, low), torch.full_like(stored.offsets, high)
        return replace(stored, codes=codes, offsets=points)


@pytest.mark.parametrize("case", ["int8 g64, zero points", "int4 g128, zero points"])
def test_the_largest_sums_of_bytes_are_exact(case):
    """Beside activations that are all as large as their scale allows, of either sign by those that share one."""
    spec = spec_of_case(case)
    weights = FarthestWeights(spec, ArrayWeights(spec))
    ours, reference = (FiberBackend(weights, BackendOptions(), 3), ReferenceBackend(weights, BackendOptions()))
    for stage in ("o_proj", "down_proj"):
        alike = 32 * lower(build(spec), GPUS["h200"], 3).weights[stage].shared_steps
        state = inputs(spec, stage, 0)
        for key, value in state.items():
            if value.is_floating_point():
                signs = torch.where(torch.arange(value.shape[-1]) // alike % 3 == 0, -1.0, 1.0)
                state[key] = signs.expand_as(value) * (2 - 2**-6)
        expected, got = (b.run_stage(stage, 0, state) for b in (reference, ours))
        for key, want in expected.items():
            assert want.abs().max() > 50
            # four signs of 128 values each leave a quarter of o_proj's sums: as much less the error is over
            assert error_of(got[key], want) < 1e-5, (stage, key)


def test_all_stages_were_judged():
    assert set(STAGES) == STAGE_READS.keys() - {"embed", "attention", "mix"}


KL_TOKENS = [(5 + 11 * i) % 101 for i in range(48)]


def nats(reference, ours):
    """KL(reference || ours), mean over positions."""
    want, got = (torch.from_numpy(b.forward_logits(KL_TOKENS)).double() for b in (reference, ours))
    p, q = want.log_softmax(-1), got.log_softmax(-1)
    assert want.std() >= 1
    return float((p.exp() * (p - q)).sum(-1).mean())


class Rounded:
    """Another's weights in bfloat16."""

    def __init__(self, spec, weights):
        self.spec, self._of = spec, weights

    def load(self, name):
        return self._of.load(name).bfloat16().float()


@pytest.mark.slow
@pytest.mark.parametrize(
    # Small models of random weights are off by more or less than others: with minimums by 1.9 times as much here, by
    # bytes as by 16 bits of x before. Every stage of theirs is as exact (above).
    "case",
    ["int4 g128", "mxfp4", "int4 g128, zero points"],
)
def test_bytes_are_no_further_off_than_16_bits_are(case):
    """Each from float32 on the very weights that it multiplies; what is not narrow is bfloat16's in both."""
    spec = spec_of_case(case)
    narrow = NarrowWeights(spec, Rounded(spec, ArrayWeights(spec)))
    off = [
        nats(ReferenceBackend(weights, BackendOptions()), FiberBackend(weights, BackendOptions(), 3))
        for weights in (narrow, Rounded(spec.replace(narrow=()), narrow))
    ]
    assert 0 < off[0] <= UNPACKED * off[1], off


@pytest.mark.parametrize("case", ["int4 g128", "mxfp4, float16"])
def test_attention_alone_says_what_bytes_o_proj_would_multiply(case):
    ours, reference = opened(case)
    state = inputs(ours.spec, "attention", 0)
    expected, got = (b.run_stage("attention", 0, state) for b in (reference, ours))
    for key, want in expected.items():
        assert error_of(got[key], want) < LIMITS[ours.spec.dtype], key


def test_attention_of_many_heads_is_staged_as_bytes_eight_values_a_thread():
    spec = narrow_spec(FORMATS["int4-g128"], **LARGE | {"hidden_size": 128, "num_heads": 66, "num_kv_heads": 2})
    weights = NarrowWeights(spec, ArrayWeights(spec))
    ours = FiberBackend(weights, BackendOptions(), 2)
    o_proj = ours.layout.lowering.schedule.stage("o_proj")
    assert ours.layout.lowering.padded_k(o_proj) >= 8 * batches.THREADS and o_proj.cols % 512
    assert_stage_agrees(ours, ReferenceBackend(weights, BackendOptions()), "attention")


COUNT = 4
SHARING = 4  # blocks that eight columns of four key/value heads need


def shared(backend, *requests):
    """What `run` gives where the kernel of columns, and not turns, has served."""
    served = run(backend, *requests)
    assert [k.layout.columns for k in backend.columns.kernels] == [len(requests)]
    return served


@functools.cache
def alone(case):
    backend = FiberBackend(weights_of(case), BackendOptions(num_slots=1), SHARING)
    return [run(backend, request(0, prompt, COUNT))[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("case", "count"),
    [
        pytest.param("fp8 blocks", 8, marks=pytest.mark.slow),
        ("int4 g128", 8),
        pytest.param("int4 g32, minimums (Q4_1)", 8, marks=pytest.mark.slow),
        pytest.param("int4 g32, zero points, head", 8, marks=pytest.mark.slow),
        pytest.param("int4 g32, minimums (Q4_1)", 2, marks=pytest.mark.slow),
        pytest.param("mxfp4", 8, marks=pytest.mark.slow),
        pytest.param("mxfp4", 2, marks=pytest.mark.slow),
        pytest.param("mxfp4, then int4 zero points", 2, marks=pytest.mark.slow),
        ("int4, then int8 channels", 2),
        pytest.param("int4 g128 and head", 8, marks=pytest.mark.slow),
        pytest.param("int8 zero points, then int4", 4, marks=pytest.mark.slow),
        pytest.param("int8 zero points, then int4", 8, marks=pytest.mark.slow),
        pytest.param("16 bits, then mxfp4", 8, marks=pytest.mark.slow),
        pytest.param("int4, then fp8 blocks", 8, marks=pytest.mark.slow),
        pytest.param("int8 g32 and head (Q8_0)", 8, marks=pytest.mark.slow),
        pytest.param("int8 channels", 2, marks=pytest.mark.slow),
        pytest.param("fp8 blocks", 2, marks=pytest.mark.slow),
        pytest.param("fp8 channels", 2, marks=pytest.mark.slow),
        pytest.param("fp8 channels", 8, marks=pytest.mark.slow),
    ],
)
def test_a_request_among_others_has_the_bits_that_it_has_alone(case, count):
    backend = ColumnBackend(weights_of(case), BackendOptions(num_slots=count), SHARING, counts=(count,))
    served = shared(backend, *(request(i, PROMPTS[i], COUNT) for i in range(count)))
    one = FiberBackend(weights_of(case), BackendOptions(num_slots=1), SHARING)
    for slot, steps in served.items():
        assert steps == alone(case)[slot]
        run(one, request(0, PROMPTS[slot], COUNT))
        rows = len(PROMPTS[slot]) + COUNT - 1
        assert backend.memory.cache[slot][..., :rows, :].equal(one.memory.cache[0][..., :rows, :])


@pytest.mark.parametrize(("count", "room"), [pytest.param(8, 120_000, marks=pytest.mark.slow), (2, 36_000)])
def test_operands_that_are_read_become_the_bytes_that_tokens_have(count, room, monkeypatch):
    """down_proj's last ones find no room: they stay words in memory, and become bytes for each unit."""
    spec = narrow_spec(AWQ, **LARGE | {"hidden_size": 128, "intermediate_size": 12288, "head_dim": 16})
    weights = NarrowWeights(spec, ArrayWeights(spec))
    monkeypatch.setattr(batches, "scratch_room", lambda lowering: room)
    backend = ColumnBackend(weights, BackendOptions(num_slots=count), SHARING, counts=(count,))
    lowering = lower(build(spec), GPUS["h200"], SHARING)
    stage = lowering.schedule.stage("down_proj")
    read, held = (batches.read_steps(lowering, stage, count), batches.held_steps(lowering, stage, count))
    assert read and read + held < lowering.steps(stage)
    served = shared(backend, *(request(i, PROMPTS[i], COUNT) for i in range(count)))
    one = FiberBackend(weights, BackendOptions(num_slots=1), SHARING)
    for slot, steps in served.items():
        assert steps == run(one, request(0, PROMPTS[slot], COUNT))[0]
        rows = len(PROMPTS[slot]) + COUNT - 1
        assert backend.memory.cache[slot][..., :rows, :].equal(one.memory.cache[0][..., :rows, :])


HELD_FIRST = {"hidden_size": 4096, "intermediate_size": 128, "head_dim": 16, "num_layers": 1, "vocab_size": 384}


TOLD = SamplingParams(temperature=0, max_tokens=2, logprobs=5)


@functools.cache
def opened_held_first():
    """Weights of a model whose head's operands take turns in scratch, and what each request says alone."""
    spec = narrow_spec(FORMATS["int4-g128"], **LARGE | HELD_FIRST)
    lowering = lower(build(spec), GPUS["h200"], SHARING)
    head = lowering.schedule.stage("lm_head")
    assert (batches.held_steps(lowering, head, 8), lowering.steps(head)) == (4, 8)
    assert batches.staged_bytes(lowering, head, 8) == 4 * batches.step_bytes(lowering, head, 8)
    weights = NarrowWeights(spec, ArrayWeights(spec))
    one = FiberBackend(weights, BackendOptions(num_slots=1), SHARING)
    return weights, [run(one, request(0, prompt, 2, TOLD))[0] for prompt in PROMPTS]


def as_alone(include=None):
    """Whether each of eight requests has the tokens and the log-probabilities that it has alone."""
    weights, alone = opened_held_first()
    backend = ColumnBackend(weights, BackendOptions(num_slots=8), SHARING, counts=(8,))
    requests = [request(i, prompt, 2, TOLD) for i, prompt in enumerate(PROMPTS)]
    served = shared(backend, *requests)
    if include is not None:
        (kernel,) = (k.kernel for k in backend.columns.kernels)
        kernel.library = compile_walk(kernel.layout, kernel.flags, include=include)
        served = run(backend, *requests)
    return [served[i] == steps for i, steps in enumerate(alone)]


def test_eight_requests_of_int4_have_a_ring_of_seven():
    """4 of 16 KB, with operands of the head all in scratch: all four waits of a layer are longer."""
    spec = with_format(named_shape("qwen3-8b"), FORMATS["int4-g128"])
    lowering = lower(build(spec), GPUS["h200"])
    layout, head = lay_out_columns(lowering, 2048, 8), lowering.schedule.stage("lm_head")
    assert layout.ring_slots == 7 and layout.shared_bytes <= GPUS["h200"].shared_bytes
    assert batches.batch_units(lowering, head, 8) == 5 and batches.sum_buffers(lowering, head, 8) == 2
    assert layout.stage_bytes(head) <= layout.scratch_bytes


@pytest.mark.parametrize("name", ["qwen3-32b", "llama-3.3-70b"])
def test_the_largest_slots_leave_a_ring_of_two_windows_bytes(name):
    lowering = lower(build(with_format(named_shape(name), FORMATS["q4_1"])), GPUS["h200"])
    layout = lay_out(lowering, 2048)
    assert layout.ring_slots == lowering.least_ring_slots == 7 < 2 * lowering.least_window
    assert layout.ring_slots * lowering.ring_slot_bytes >= 2 * STREAM_WINDOW_BYTES


def test_a_head_s_operands_held_before_others_take_their_place_are_those_of_one_token():
    assert as_alone() == [True] * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        ("columns/stream.h", "(i * 128 < kHeldValues ? 0 : Stage::kHeld)", "0"),
        ("operands.h", "held[step] = load(step + kFirst);", "held[step] = load(step ^ 1 | kFirst);"),
        ("columns/stream.h", "      hold();\n", ""),
    ],
    ids=["behind one another", "other steps held", "none held"],
)
def test_a_planted_fault_in_what_is_held_first_is_seen(fault, tmp_path):
    include = plant(tmp_path, fault)
    try:
        assert not all(as_alone(include))
    except AssertionError as error:  # operands that nobody has put may hold NaN, which voids a run
        assert "the run is void" in str(error)


@pytest.mark.parametrize("case", ["fp8 blocks", pytest.param("int4 g128, zero points", marks=pytest.mark.slow)])
def test_a_prompt_in_chunks_leaves_the_bits_that_tokens_leave(case):
    prompt = [(3 + 7 * i) % 101 for i in range(21)]
    backends = [kind(weights_of(case), BackendOptions(), 3) for kind in (ChunkBackend, FiberBackend)]
    steps = [run(backend, request(0, prompt, COUNT)) for backend in backends]
    assert steps[0] == steps[1]
    chunks, tokens = (backend.memory.cache[0][..., : len(prompt) + COUNT - 1, :] for backend in backends)
    assert chunks.equal(tokens)


# What is planted in narrow.h, the case that must see it, and its text.
PLANTED = {
    "the scale of the next row": ("fp8 rows g32", "% Weights::kScaleRows;", "% Weights::kScaleRows ^ 1;"),
    "the scale of the next granule": (
        "fp8 rows g32",
        "int n = number(granule, i);\n    if constexpr (Weights::kScaleKind == kScaleF32)",
        "int n = number((granule + 1) % Weights::kGranules, i);\n    if constexpr (Weights::kScaleKind == kScaleF32)",
    ),
    "the next code": ("fp8 channels", "v.w[j + 1] = e4m3_second(q);", "v.w[j + 1] = e4m3_first(q);"),
    "the nibbles of the other step": (
        "int4 g128",
        "w[0] = (codes.w[step] << 4) & 0xf0f0f0f0u",
        "w[0] = (codes.w[step ^ 1] << 4) & 0xf0f0f0f0u",
    ),
    "nibbles as they are": ("int4 g32, float16", "(codes.w[step] << 4) & 0xf0f0f0f0u", "codes.w[step] & 0x0f0f0f0fu"),
    "the scale of the next step": (
        "int4 g32, float16",
        "b.in_warp % 4 % Weights::kPack * Weights::kGranules",
        "(b.in_warp + 1) % 4 % Weights::kPack * Weights::kGranules",
    ),
    "bytes of the next half of a step": (
        "int8 g64, zero points",
        "w[1] = codes.w[2 * step + 1];",
        "w[1] = codes.w[2 * step];",
    ),
    "int4's zero point": ("int4 g128, zero points", "return (8 - static", "return (7 - static"),
    "int4's zero beside minimums": ("int4 g32, minimums (Q4_1)", "? 8 * kTimes : 0", "? 7 * kTimes : 0"),
    "a zero point without its sign": (
        "int8 g64, zero points",
        "-(static_cast<int>(point ^ 0x80u) - 128)",
        "-static_cast<int>(point)",
    ),
    "the zero point of the next row": (
        "int4 g128, zero points",
        "from = record + row * (Weights::kGranules * kEach);",
        "from = record + (row ^ (kEach == 1)) * (Weights::kGranules * kEach);",
    ),
    "zero points left out": ("int8 g64, zero points", "u32 point = offsets.", "u32 point = 0 & offsets."),
    "the minimum of the next granule": (
        "int4 g32, minimums (Q4_1)",
        "offsets.load(b, record + kOffsetsAt);",
        "offsets.load(b, record);",
    ),
    "negative ones as positive": (
        "mxfp4",
        "negative[0] = e2m1_bytes(table, other), negative",
        "negative[0] = e2m1_bytes(table, q), negative",
    ),
    "scales twice as large": ("mxfp4", "? 0x400000u : exponent);", "? 0x400000u : exponent + 0x800000u);"),
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


# Of units of five fragments, four that share scales of operands two by two and one alone.
PLANTED_IN_PAIRS = {
    "the half of the sums that a thread has, twice": ("exchanged(own, other)", "exchanged(own, own)"),
    "the scale of the fragment beside": ("one_of(x.odd, slot", "one_of(!x.odd, slot"),
    "its operands' scale": ("x.odd ? next.scale : row.scale", "x.odd ? row.scale : next.scale"),
    "a fragment alone, in two threads": ("x.odd == (f % 2 != 0) ? sum", "true ? sum"),
    "even fragments alone": (
        "multiply_pair_of_one<Stage, true>(slot, x, f, row, row_at(Weights::kPack), c)",
        "multiply_pair_of_one<Stage, false>(slot, x, f, row, row, c)",
    ),
}


@pytest.mark.parametrize("what", PLANTED_IN_PAIRS)
def test_a_fault_in_a_pair_of_fragments_is_seen(what, tmp_path):
    weights = five_fragments("int4-g128")
    backend = FiberBackend(weights, BackendOptions(), 3)
    state = inputs(backend.spec, "gate_up_proj", 0)
    backend.run_stage("gate_up_proj", 0, state)  # loads the kernel
    kernel = backend._kernels[-1]
    header = "matvec.h" if what == "even fragments alone" else "byte_products.h"
    include = plant(tmp_path, (header, *PLANTED_IN_PAIRS[what]))
    kernel.library = compile_walk(kernel.layout, kernel.flags, include=include)
    expected = ReferenceBackend(weights, BackendOptions()).run_stage("gate_up_proj", 0, state)
    got = backend.run_stage("gate_up_proj", 0, state)
    assert max(error_of(got[key], want) for key, want in expected.items()) > 0.01


def test_int4_with_one_scale_a_row_shares_those_of_operands():
    shared = {}
    for name, how in FORMATS.items():
        lowering = lower(build(with_format(named_shape("qwen3-8b"), how)), GPUS["h200"])
        shared[name] = lowering.weights["down_proj"].shared_steps
    assert {name for name, steps in shared.items() if steps == 4} == {"int4-g128", "int4-g128-zp"}
    assert set(shared.values()) == {1, 4}
