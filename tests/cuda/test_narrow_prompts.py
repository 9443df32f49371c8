"""Narrow weights in the products of prompts: every value the checkpoint's, by prompt.cu and by unpack.cu."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.layout.header import bias_places
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.backends.cuda.layout.prompt import WIDE, kernels_of, render_product, takes
from kog_triton.backends.cuda.layout.unpack import render_unpack, unpacked_bytes, unpacked_stages
from kog_triton.backends.cuda.matrices import ArenaMatrices
from kog_triton.backends.cuda.memory import HALF, allocate
from kog_triton.backends.cuda.products import ArenaProducts
from kog_triton.model.shapes import with_format
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.cuda_weights import FRAGMENT_ROWS, StreamWeights
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import request, run
from tests.lib.cuda_walk import ROOT, FiberBackend
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.machine_code import innermost, instructions, is_local, sass_of_text
from tests.lib.narrow_stages import AWQ, CASES, LARGE, weights_of
from tests.lib.narrow_stream import NarrowWeights, narrow_spec
from tests.lib.product_cases import dealt
from tests.lib.product_runs import multiplied
from tests.lib.real_shapes import real_shape
from tests.lib.unpacked import unpacking_of

LANES = {"num_lanes": 2, "delay": 0, "hidden_size": 1024, "intermediate_size": 2048, "num_heads": 16}
MORE = {
    "lanes, int4 zero points": (AWQ, LARGE | LANES),
    "lanes, fp8 channels": (FORMATS["fp8-channel"], LARGE | LANES),
    "lanes, int8 channels": (FORMATS["int8-channel"], LARGE | LANES),
    "int4, units that end within ring slots": (
        FORMATS["int4-g128"],
        LARGE | {"hidden_size": 128, "intermediate_size": 10240, "head_dim": 16},
    ),
}


BOTH_SIGNS = {"int4 g32, scales of both signs (Q4_0)": (FORMATS["q4_0"], LARGE)}


class BothSigns(NarrowWeights):
    """Every other scale is negative, as llama.cpp makes them."""

    def stored(self, name):
        tensor = super().stored(name)
        scales = tensor.scales.clone()
        scales[..., ::2] *= -1
        return replace(tensor, scales=scales)


def narrow_weights(case):
    if case in CASES:
        return weights_of(case)
    how, sizes = (MORE | BOTH_SIGNS)[case]
    spec = narrow_spec(how, **sizes)
    return (BothSigns if case in BOTH_SIGNS else NarrowWeights)(spec, ArrayWeights(spec))


def opened(case, blocks=6):
    """Weights, their lowering and a rank's memory."""
    weights = narrow_weights(case)
    lowering = lower(build(weights.spec), find_gpu("h200"), blocks)
    return weights, lowering, allocate(lay_out(lowering, 64), weights, 1, torch.device("cpu"))


def wanted(weights, stage, layer):
    """The bits of the values that the codes stand for, rounded once."""
    return dealt(weights, stage, layer).to(HALF[weights.spec.dtype]).view(torch.int16)


def differing(case, include):
    """Stages and layers whose matrices are not the checkpoint's."""
    weights, lowering, memory = opened(case)
    dtype = HALF[weights.spec.dtype]
    matrices = ArenaMatrices(lowering, memory.weights, dtype, unpacking_of(lowering, memory, include))
    wrong = []
    for layer in (1, 0):
        for stage in layer_matrices(lowering.schedule):
            got = matrices.unpack(layer, stage.name)
            want = wanted(weights, stage, layer)
            assert got.dtype == dtype and got.shape == want.shape
            if not torch.equal(got.view(torch.int16), want):
                wrong.append((layer, stage.name))
    return wrong


@pytest.mark.parametrize("case", [*CASES, *MORE])
def test_every_value_is_the_checkpoint_s_rounded_once(case):
    assert not differing(case, ROOT / "backends/cuda/include")


VALUES, UNPACK = "prompt/values.h", "prompt/unpack.h"
PLANTED = {  # the case that must see it, its header and text
    "the scale of the next row": ("fp8 rows g32", VALUES, "row % kRows *", "(row ^ 1) % kRows *"),
    "the scale of the first granule": ("int4 g32, float16", UNPACK, "step * Weights::kGranules / Weights::kPack", "0"),
    "no zero point": ("int8 g64, zero points", VALUES, "product(value - point,", "product(value,"),
    "no zero point of nibbles": ("int4 g128, zero points", VALUES, "(n) - point,", "(n) - 8,"),
    "no minimum": ("int4 g32, minimums (Q4_1)", VALUES, "value + minimum", "value"),
    "E2M1 without its sign": ("mxfp4", VALUES, " | (code & 8) << 28", ""),
    "nibbles in order": ("int4 g128", VALUES, "i % 4 * 2 + i / 4", "i"),
    "a row's scale of the row before": ("fp8 channels", UNPACK, "* 8 + lane / 4;", "* 8 + lane / 4 - (lane > 3);"),
    "rows of the first shard": ("lanes, fp8 channels", UNPACK, "(unit / p.shard_units) * p.rows", "(0)"),
    "steps side by side": ("fp8 tensors", UNPACK, "to + step * kWarps * kFragmentBytes", "to"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_seen(what, tmp_path):
    case, *edit = PLANTED[what]
    assert differing(case, plant(tmp_path, tuple(edit)))


# ---- products ----


def errors_of_products(case, which, include=ROOT / "backends/cuda/include"):
    """Of the stages of a case that the kernels read, by their kernel `which`: relative errors of products with what the
    checkpoint's values are in 16 bits. Their sums are exact but for float32's last bits: one value that is off by its
    last bit makes 1e-4."""
    weights, lowering, memory = opened(case)
    dtype, errors = HALF[weights.spec.dtype], {}
    for stage in layer_matrices(lowering.schedule):
        if not takes(lowering, stage):
            continue
        kernel = kernels_of(lowering.weights[stage.name])[which]
        torch.manual_seed(len(errors))
        x = torch.randn(lowering.schedule.num_shards, 13, stage.cols).to(dtype)
        want = torch.bmm(x.double(), dealt(weights, stage, 1).to(dtype).double().mT)
        got = multiplied(lowering, memory, kernel, stage, 1, x, include).double()
        errors[stage.name] = float((got - want).norm() / want.norm())
    return errors


MULTIPLIED = [  # the case, and which of its kernels: of the smallest tiles and of two warpgroups
    ("int4 g128", 2),
    ("int4 g32, float16", 0),
    ("int4 g32, minimums (Q4_1)", 2),
    ("mxfp4", 0),
    ("fp8 rows g32", 2),
    ("int8 g64, zero points", 0),
    ("fp8 blocks, bf16 scales", 2),
    ("fp8 blocks", 0),
    ("lanes, fp8 channels", 0),
    *((case, 0) for case in BOTH_SIGNS),
]
UNREAD = ("fp8 blocks, odd sizes", "fp8 channels", "int8 channels")  # by any of the kernels
# Cases whose K is in fewer than four parts: that of down_proj; that of qkv_proj and gate_up_proj.
SHORT = ("int4 ", "mxfp4", "16 bits", "int8 zero points, then int4")
HALVES = ("odd sizes", "units that end within ring slots", "then int8 channels")


def read_of(case):
    """Stages of a case that the kernels read."""
    if case in UNREAD:
        return ()
    if case.endswith(HALVES):
        return "o_proj", "down_proj"
    stages = "qkv_proj", "o_proj", "gate_up_proj", "down_proj"
    return stages[:3] if case.startswith(SHORT) else stages


SLOWLY = [
    *((case, which) for case in [*CASES, *MORE] for which in (0, 2) if (case, which) not in MULTIPLIED),
    ("int4 g32, float16", 4),  # two stages of the ring
    ("fp8 blocks", 4),
]


@pytest.mark.parametrize(
    ("case", "which"), [*MULTIPLIED, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOWLY)], ids=str
)
def test_products_are_those_of_the_values(case, which):
    errors = errors_of_products(case, which)
    assert tuple(errors) == read_of(case)
    assert all(error < 1e-6 for error in errors.values()), errors


PIECES = "prompt/pieces.h"
IN_PRODUCTS = {  # the case that must see it, its kernel and header and text
    "scales of the part before": ("fp8 blocks, bf16 scales", 2, PIECES, "stage * kFragments * kRecord & 15", "0"),
    "scales of the first fragment": ("fp8 blocks", 0, PIECES, "+ fragment * kRecord", ""),
    "scales of the first granule": ("mxfp4", 0, PIECES, "k * Weights::kGranules / Weights::kPack", "0"),
    "no row's scale": ("lanes, fp8 channels", 0, PIECES, "beside.scale = row_scale;", ""),
    "slots side by side": ("int4 g128", 2, PIECES, "slot * others", "0"),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_PRODUCTS)
def test_a_fault_planted_in_products_is_seen(what, tmp_path):
    case, which, *edit = IN_PRODUCTS[what]
    errors = errors_of_products(case, which, plant(tmp_path, tuple(edit)))
    assert any(not error < 1e-3 for error in errors.values()), errors


class Noted:
    """A kernel whose launches are noted: its function's name and a copy of the argument."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def queued(self, blocks, threads, argument):
        def queue(stream):
            copy = type(argument).from_buffer_copy(argument)
            self.launches.append((self.name, blocks, stream, copy))

        return queue


def test_a_product_reads_the_arena_and_its_rows_scales(monkeypatch):
    _, lowering, memory = opened("lanes, fp8 channels")
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    launches = []
    assert not unpacked_stages(lowering) and not unpacked_bytes(lowering, ())
    ours = ArenaProducts(
        lowering, memory.weights, torch.bfloat16, lambda kernel, name, _: Noted(name, launches), memory.biases
    )
    stage, (places, rows) = lowering.schedule.stage("o_proj"), bias_places(lowering)
    ours.product(1, "o_proj", torch.zeros(2, 40, stage.cols).bfloat16(), None)
    ours.product(1, "o_proj", torch.zeros(2, 40, stage.cols).bfloat16(), None)
    assert [name for name, *_ in launches] == 4 * ["kog_arrange", "kog_product"]
    assert {where for _, _, where, _ in launches} == {7}
    assert {arrange.pack_shift for *_, arrange in launches[::2]} == {1}
    for shard, (*_, multiply) in enumerate(launches[1::2]):
        first = rows + places["o_proj"][1] + shard % 2 * stage.rows
        assert multiply.row_scales == memory.biases.data_ptr() + 4 * first
        assert multiply.arena == memory.weights.data_ptr()
    assert memory.biases.numel() >= 2 * rows


def test_stages_that_no_kernel_reads_are_unpacked():
    """Of fragments of 16 values of K all, and of real models those of which K has two parts."""
    _, lowering, memory = opened("int8 channels")
    stages = unpacked_stages(lowering)
    assert stages == tuple(layer_matrices(lowering.schedule))
    assert unpacked_bytes(lowering, stages) == unpacking_of(lowering, memory).buffer.nbytes > 0
    for name, unread in (("qwen3-8b", []), ("laneformer-2b", ["o_proj"])):
        spec = with_format(real_shape(name, 1), FORMATS["int8-channel"])
        real = lower(build(spec), find_gpu("h200"))
        assert [stage.name for stage in unpacked_stages(real)] == unread


# ---- prompts ----


class Unpacked:
    """What a checkpoint of 16 bits would have in place of the narrow weights."""

    def __init__(self, narrow):
        self.spec, self.load = narrow.spec.replace(narrow=()), narrow.load


@pytest.mark.parametrize("case", ["int4 g128, zero points", "fp8 blocks, odd sizes"])
def test_a_prompt_leaves_what_that_of_the_unpacked_weights_leaves(case):
    weights = weights_of(case)
    prompt, caches = [(3 + 7 * i) % 101 for i in range(40)], []
    for source in (weights, Unpacked(weights)):
        backend = FiberBackend(source, BackendOptions(prefill="library"), 3)
        steps = run(backend, request(0, prompt, 2))
        assert steps
        caches.append(backend.memory.cache[0][..., : len(prompt), :].clone())
    assert caches[0].abs().sum() > 0
    assert caches[0].equal(caches[1])


# ---- machine code ----


KINDS = ("int4-g128", "int4-g128-zp", "mxfp4", "fp8-block", "fp8-channel", "q8_0", "q4_1")


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
@pytest.mark.parametrize("kind", KINDS)
def test_no_thread_takes_so_long_that_memory_waits(kind, dtype):
    """A layer of Qwen3-8B is 193 million values, 116 us of memory for int4: at four instructions a cycle of 132
    multiprocessors, 1.7 GHz, 17 instructions a value."""
    weights = StreamWeights(FORMATS[kind], 32)
    source = (ROOT / "backends/cuda/unpack.cu").read_text()
    code = instructions(sass_of_text(render_unpack(weights, dtype) + source))
    assert not any(is_local(what) for _, what in code)
    assert sum("STG.E.128" in what for _, what in code) == weights.pack
    assert any("LDG.E.128" in what for _, what in code)
    assert len(code) < (16 if weights.row_scales else 10) * 8 * weights.pack


INSTRUCTIONS = {"int4-g128": 3.5, "int4-g128-zp": 4, "q8_0": 6, "mxfp4": 7}  # a value


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        ("int4-g128", 4),
        ("fp8-block", 4),
        *(
            # MXFP4's loops of 16 and 32 tokens have the wait for a stage inside: they are no innermost ones.
            pytest.param(kind, which, marks=pytest.mark.slow)
            for kind in KINDS
            for which in range(2 if kind == "mxfp4" else 0, 5)
            if (kind, which) not in (("int4-g128", 4), ("fp8-block", 4))
        ),
    ],
)
def test_products_that_widen_follow_each_other_and_spill_in_no_loop(kind, which):
    """Values widen while the products before run."""
    rows = 1 if kind == "fp8-block" else FRAGMENT_ROWS
    kernel = kernels_of(StreamWeights(FORMATS[kind], 32, rows))[which]
    source = (ROOT / "backends/cuda/prompt.cu").read_text()
    code, wide = (
        instructions(sass_of_text(render_product(k, DType.BF16) + source)) for k in (kernel, kernels_of(WIDE)[which])
    )
    loops = [[b for b in innermost(of, r"\bHGMMA") if any("HGMMA" in w for w in b)] for of in (code, wide)]
    (loop,), (plain,) = loops
    assert sum("HGMMA" in what for what in loop) == 2 * 2 * kernel.blocks
    waits = [what for what in loop if "DEPBAR" in what and "gsb0" in what]
    assert len(waits) == 2 and all("0x1" in what for what in waits)
    copies = [*innermost(code, r"\bUBLKCP"), *innermost(code, r"\bLDGSTS")]
    assert len(copies) == (2 if kernel.weights.row_scales else 3)
    assert not any(is_local(what) for body in (loop, *copies) for what in body)
    values = 2 * kernel.blocks * 2 * 8  # of a thread, in two steps
    assert len(loop) - len(plain) < INSTRUCTIONS.get(kind, 5) * values
