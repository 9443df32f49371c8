"""Narrow weights in 16 bits for the products of prompts: every value the checkpoint's, where the products read it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.backends.cuda.layout.prompt import KERNELS, render_product, takes
from kog_triton.backends.cuda.layout.unpack import render_unpack, unpacked_bytes
from kog_triton.backends.cuda.matrices import ArenaMatrices
from kog_triton.backends.cuda.memory import HALF, allocate
from kog_triton.backends.cuda.products import ArenaProducts, unpacked_group_tables
from kog_triton.backends.cuda.unpacking import Unpacking
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.cuda_weights import StreamWeights
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import request, run
from tests.lib.cuda_walk import ROOT, FiberBackend
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.machine_code import instructions, is_local, sass_of_text
from tests.lib.narrow_stages import AWQ, CASES, LARGE, weights_of
from tests.lib.narrow_stream import NarrowWeights, narrow_spec
from tests.lib.product_cases import dealt
from tests.lib.unpacked import unpacking_of

LANES = {
    "num_lanes": 2,
    "delay": 0,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_heads": 16,
}
MORE = {
    "lanes, int4 zero points": (AWQ, LARGE | LANES),
    "lanes, fp8 channels": (FORMATS["fp8-channel"], LARGE | LANES),
    "lanes, int8 channels": (FORMATS["int8-channel"], LARGE | LANES),
}


def narrow_weights(case):
    if case in CASES:
        return weights_of(case)
    how, sizes = MORE[case]
    spec = narrow_spec(how, **sizes)
    return NarrowWeights(spec, ArrayWeights(spec))


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
    matrices = ArenaMatrices(
        lowering, memory.weights, dtype, unpacking_of(lowering, memory, include)
    )
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


PLANTED = {  # the case that must see it, and its text in prompt/unpack.h
    "the scale of the next row": ("fp8 rows g32", "row % Weights::kScaleRows *", "(row ^ 1) % Weights::kScaleRows *"),
    "the scale of the first granule": ("int4 g32, float16", "step * Weights::kGranules / Weights::kPack", "0"),
    "no zero point": ("int4 g128, zero points", "value - point", "value - 8"),
    "no minimum": ("int4 g32, minimums (Q4_1)", "value + minimum", "value"),
    "E2M1 without its sign": ("mxfp4", " | (code & 8) << 28", ""),
    "nibbles in order": ("int4 g128", "i % 4 * 2 + i / 4", "i"),
    "a row's scale of the row before": ("fp8 channels", "* 8 + lane / 4;", "* 8 + lane / 4 - (lane > 3);"),
    "rows of the first shard": ("lanes, fp8 channels", "(unit / p.shard_units) * p.rows", "(0)"),
    "steps side by side": ("fp8 tensors", "to + step * kWarps * kFragmentBytes", "to"),
}  # fmt: skip


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_seen(what, tmp_path):
    case, before, after = PLANTED[what]
    assert differing(case, plant(tmp_path, ("prompt/unpack.h", before, after)))


# ---- where products read them ----


def order_of_k(parts, steps):
    """The value of K behind each place of the product's order (prompt.cu, test_prompt_products.py)."""
    block, j, half, quarter, e = np.indices((parts * steps, 2, 2, 4, 2))
    natural = block % parts * steps + block // parts
    return (natural * 32 + 8 * quarter + 4 * j + 2 * half + e).reshape(-1)


@pytest.mark.parametrize("case", ["int4 g128", "16 bits, then mxfp4", "lanes, int4 zero points"])
def test_the_products_kernel_finds_every_weight_in_its_order(case):
    weights, lowering, memory = opened(case)
    unpacking = unpacking_of(lowering, memory)
    stages = {s.name: s for s in layer_matrices(lowering.schedule) if takes(lowering, s)}
    assert stages
    table, at = unpacked_group_tables(lowering, stages)
    assert len(at) == len(stages) * weights.spec.num_layers
    for (name, layer), firsts in at.items():
        stage, parts = stages[name], lowering.tilings[name].k_parts
        assert len(firsts) == lowering.schedule.num_shards
        unpacking.run(layer, name)
        held = unpacking.buffer.view(torch.int16).numpy()
        want = wanted(weights, stage, layer).numpy()
        padded = np.zeros((*want.shape[:2], lowering.padded_k(stage)), np.int16)
        padded[..., : stage.cols] = want
        ordered = padded[..., order_of_k(parts, lowering.steps(stage))]
        blocks = lowering.padded_k(stage) // 32
        for shard, first in enumerate(firsts):
            groups = table[first : first + -(-stage.rows // 8)]
            got = np.zeros((len(groups), 8, blocks, 2, 2, 4, 2), np.int16)
            for n, (slab, before, inside, _) in enumerate(groups):
                for block in range(blocks):
                    place = ((slab + before + block // parts) * 8192 + inside) // 2
                    place += block % parts * 256
                    fragment = held[place : place + 256].reshape(8, 4, 2, 2, 2)
                    got[n, :, block] = fragment.transpose(0, 2, 3, 1, 4)
            rows = got.reshape(len(groups) * 8, -1)[: stage.rows]
            assert np.array_equal(rows, ordered[shard]), (name, layer)


class Noted:
    """A kernel whose launches are noted: its function's name and a copy of the argument."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def queued(self, blocks, threads, argument):
        def queue(stream):
            copy = type(argument).from_buffer_copy(argument)
            self.launches.append((self.name, blocks, stream, copy))

        return queue


def test_a_product_unpacks_its_matrix_and_reads_the_buffer(monkeypatch):
    _, lowering, memory = opened("lanes, fp8 channels")
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    launches = []
    unpacking = Unpacking(
        lowering, memory.weights, memory.biases, lambda kind: Noted("kog_unpack", launches)
    )
    ours = ArenaProducts(
        lowering,
        memory.weights,
        torch.bfloat16,
        lambda kernel, name, _: Noted(name, launches),
        unpacking,
    )
    stage = lowering.schedule.stage("o_proj")
    ours.product(1, "o_proj", torch.zeros(2, 40, stage.cols).bfloat16(), None)
    assert [name for name, *_ in launches] == ["kog_unpack"] + 2 * ["kog_arrange", "kog_product"]
    assert {where for _, _, where, _ in launches} == {7}
    (_, blocks, _, unpack), *products = launches
    assert blocks == 2 * lowering.num_units(stage) * lowering.unit_fragments(stage)
    assert unpack.arena == memory.weights.data_ptr() and unpack.out == unpacking.buffer.data_ptr()
    for *_, multiply in products[1::2]:
        assert multiply.arena == unpacking.buffer.data_ptr()
        assert (multiply.ring_slot, multiply.ring_slot_step) == (1, 1)
    assert unpacking.buffer.nbytes == unpacked_bytes(lowering)


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


def test_products_of_unpacked_weights_wait_before_they_read_them():
    """As many waits for the launch before as of 16-bit weights, and the one of the warps that copy these."""
    source = (ROOT / "backends/cuda/prompt.cu").read_text()
    waits = [
        sum(
            "ACQBULK" in what
            for _, what in instructions(
                sass_of_text(render_product(KERNELS[0], DType.BF16, unpacked) + source)
            )
        )
        for unpacked in (False, True)
    ]
    assert waits[1] == waits[0] + 1 > 1


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
