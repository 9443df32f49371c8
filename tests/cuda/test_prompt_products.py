"""Products of prompts with the weight arena: what the kernel reads, which tiles its blocks take, and its machine code.

The kernel's own arithmetic runs on a GPU alone (tests/host/test_library_prefill.py and the GPU tests of prompts).
"""

import ctypes
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kog_triton.backends.cuda import products
from kog_triton.backends.cuda.layout.prompt import KERNELS, ProductCall, deal, render_product, takes
from kog_triton.backends.cuda.memory import pack_arena
from kog_triton.backends.cuda.products import group_tables
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu
from tests.lib.compiled import made_once, version_of
from tests.lib.cuda_walk import ROOT
from tests.lib.machine_code import innermost, instructions, sass_of_text
from tests.lib.product_cases import SPECS, dealt
from tests.lib.real_shapes import real_shape

SOURCE = ROOT / "backends/cuda/prompt.cu"
# ---- what the kernel reads ----


def order_of_k(parts, steps):
    """The value of K behind each place of the kernel's order (prompt.cu): blocks of 32, step by step, each part's next
    one; in a block, the pairs that a thread's register holds of every quarter."""
    block, j, half, quarter, e = np.indices((parts * steps, 2, 2, 4, 2))
    natural = block % parts * steps + block // parts
    return (natural * 32 + 8 * quarter + 4 * j + 2 * half + e).reshape(-1)


def read_as_the_kernel(lowering, stage, arena, groups):
    """Rows of 8-row groups, in the kernel's order of K: copy_weights and Consumer::load."""
    parts, chunk = lowering.tilings[stage.name].k_parts, lowering.fragments
    assert lowering.ring_slot_bytes == chunk * 8192
    blocks = lowering.padded_k(stage) // 32
    out = np.zeros((len(groups), 8, blocks, 2, 2, 4, 2), arena.dtype)
    for n, (begin, before, warp, _) in enumerate(groups):
        for block in range(blocks):
            f = before + block // parts
            at = f // chunk * lowering.num_blocks * chunk + f % chunk
            first = (begin * 64 + at * 8192 + (warp + block % parts) * 512) // 2
            fragment = arena[first : first + 256].reshape(8, 4, 4, 2)  # row, quarter, word, e
            # registers of two products of 16 values: words 2 j and 2 j + 1
            out[n, :, block] = fragment.reshape(8, 4, 2, 2, 2).transpose(0, 2, 3, 1, 4)
    return out.reshape(len(groups) * 8, -1)


@pytest.mark.parametrize("name", SPECS)
def test_the_kernel_finds_every_weight_in_its_order(name):
    weights, schedule = RandomWeights(SPECS[name]), build(SPECS[name])
    lowering = lower(schedule, find_gpu("h200"), 5 * schedule.num_shards)
    assert lowering.fragments == (3 if name == "three" else 2)
    embed = weights.load("embed").bfloat16()
    arena = pack_arena(lowering, weights.load, embed).view(torch.int16).numpy()
    stages = {s.name: s for s in layer_matrices(schedule) if takes(lowering, s)}
    assert set(stages) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    table, at = group_tables(lowering, stages)
    assert len(at) == 2 * len(stages)
    for (which, layer), firsts in at.items():
        stage, parts = stages[which], lowering.tilings[which].k_parts
        assert len(firsts) == schedule.num_shards
        want = dealt(weights, stage, layer).bfloat16().view(torch.int16).numpy()
        padded = np.zeros((*want.shape[:2], lowering.padded_k(stage)), np.int16)
        padded[..., : stage.cols] = want
        ordered = padded[..., order_of_k(parts, lowering.steps(stage))]
        for shard, first in enumerate(firsts):
            groups = table[first : first + -(-stage.rows // 8)]
            got = read_as_the_kernel(lowering, stage, arena, groups)
            assert np.array_equal(got[: stage.rows], ordered[shard]), (which, layer)


def test_which_stages_of_real_models_are_unpacked():
    """Those of few rows, in fragments of four; their products are a small part of a layer."""
    unpacked = {}
    for name in ("llama-3.2-1b", "qwen3-8b", "qwen2.5-0.5b"):
        schedule = build(real_shape(name, 1))
        lowering = lower(schedule, find_gpu("h200"))
        stages = layer_matrices(schedule)
        unpacked[name] = [s.name for s in stages if not takes(lowering, s)]
    assert unpacked == {"llama-3.2-1b": [], "qwen3-8b": [], "qwen2.5-0.5b": ["qkv_proj"]}


# ---- which tiles a block takes ----

WALK = """
namespace kog { constexpr int kConsumers = 512; }
struct int4 { int x, y, z, w; };
#include <kog/prompt/walk.h>
using namespace kog;
// Segments of one block, six numbers each; how many.
extern "C" int segments(const Product* p, int block, int blocks, int* out) {
  Walk walk(*p, block, blocks);
  for (int i = 0; i < walk.count; i++) {
    Segment s = walk.at(*p, i);
    Place place = place_of(*p, s.tile);
    for (int v : {s.tile, s.first, s.last, s.slot, place.row_tile, place.token_tile}) *out++ = v;
  }
  return walk.count;
}
// Of a shared tile, as Consumer::join sees it: the blocks whose parts it adds, and their slots.
extern "C" int parts_of(const Product* p, int tile, int blocks, int* out) {
  Walk walk(*p, 0, blocks);
  int begin = (tile - p->whole) * p->steps, first = walk.share_of(begin);
  int last = walk.share_of(begin + p->steps - 1);
  for (int share = first; share <= last; share++)
    *out++ = share, *out++ = walk.slot_of(*p, share, tile - p->whole);
  return last - first + 1;
}
"""


@pytest.fixture(scope="module")
def walk():
    include = ROOT / "backends/cuda/include"
    headers = [include / "kog/prompt/walk.h", ROOT / "tests/lib/cuda_host/kog/ptx.h"]

    def make(draft):
        text = draft.with_suffix(".cpp")
        text.write_text(WALK)
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{ROOT}/tests/lib/cuda_host"]
        subprocess.run([*command, f"-I{include}", str(text), "-o", str(draft)], check=True)

    parts = [version_of("g++"), WALK.encode(), *(h.read_bytes() for h in headers)]
    return ctypes.CDLL(str(made_once(parts, make)))


def call_of(way):
    call = ProductCall()
    call.row_tiles, call.token_tiles = way.row_tiles, way.token_tiles
    call.steps, call.whole = way.steps, way.whole
    return call


@pytest.mark.parametrize("seed", range(40))
def test_every_step_of_every_tile_is_taken_once(walk, seed):
    rng = np.random.default_rng(seed)
    most, rows = int(rng.choice([132, 114, 7])), int(rng.integers(1, 3000)) * 8
    way = deal(rows, 512 * int(rng.integers(1, 30)), int(rng.integers(1, 2049)), most)
    call, taken, parts = ctypes.byref(call_of(way)), {}, {}
    out = (ctypes.c_int * 6000)()
    places = set()
    for block in range(way.blocks):
        count = walk.segments(call, block, way.blocks, out)
        for tile, first, last, slot, *place in np.array(out[: 6 * count]).reshape(-1, 6).tolist():
            assert 0 <= first < last <= way.steps
            places.add((tile, *place))
            for step in range(first, last):
                assert (tile, step) not in taken
                taken[tile, step] = block
            if last - first < way.steps:
                parts.setdefault(tile, []).append((first, block, slot))
    tiles = way.row_tiles * way.token_tiles
    assert len(taken) == tiles * way.steps
    assert {(row, token) for _, row, token in places} == {
        (r, t) for r in range(way.row_tiles) for t in range(way.token_tiles)
    }
    assert len(places) == tiles
    for tile, own in parts.items():
        count = walk.parts_of(call, tile, way.blocks, out)
        assert [[b, slot] for _, b, slot in sorted(own)] == np.array(out[: 2 * count]).reshape(-1, 2).tolist()


def test_both_ways_to_deal_are_taken():
    """On an H200: of Qwen3-14B's gate_up_proj blocks share what four rounds leave; Llama-3.2-1B's qkv_proj is one."""
    assert deal(2048, 2048, 16, 132).whole == 0
    assert deal(2048, 2048, 4096, 132).kernel.tokens == 256
    way = deal(34816, 5120, 512, 132)
    assert way.kernel.tokens == 256 and way.whole == 4 * 132 < way.row_tiles * way.token_tiles
    way = deal(3072, 2048, 512, 132)
    assert way.kernel.tokens == 128 and way.whole == way.row_tiles * way.token_tiles


# ---- launches ----


class Noted:
    """A kernel whose launches are noted: its tile's tokens, blocks and a copy of the argument."""

    def __init__(self, kernel, name, launches):
        self.tokens, self.name, self.launches = kernel.tokens, name, launches

    def queued(self, blocks, threads, argument):
        def queue(stream):
            copy = type(argument).from_buffer_copy(argument)
            self.launches.append((self.name, self.tokens, blocks, stream, copy))

        return queue


def test_launches_are_made_ready_once_and_told_their_addresses(monkeypatch):
    """Of every shard its own groups, tokens and outputs."""
    schedule = build(SPECS["lanes"])
    lowering = lower(schedule, find_gpu("h200"), 5 * schedule.num_shards)
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    launches, dealt_ways, right = [], [], products.deal
    monkeypatch.setattr(products, "deal", lambda *asked: dealt_ways.append(asked) or right(*asked))
    arena = torch.zeros(64, dtype=torch.uint8)
    ours = products.ArenaProducts(
        lowering, arena, torch.bfloat16, lambda kernel, name, _: Noted(kernel, name, launches), torch.zeros(0)
    )
    stages = {s.name: s for s in layer_matrices(schedule) if takes(lowering, s)}
    _, at = group_tables(lowering, stages)
    stage = stages["o_proj"]
    shards, x = (schedule.num_shards, {n: torch.zeros(schedule.num_shards, n, stage.cols).bfloat16() for n in (40, 3)})
    for n, layer in ((40, 0), (40, 1), (3, 1), (40, 1)):
        launches.clear()
        y = ours.product(layer, "o_proj", x[n], None)
        way = right(stage.rows, lowering.padded_k(stage), n, 132)
        assert [name for name, *_ in launches] == ["kog_arrange", "kog_product"] * shards
        for shard in range(shards):
            arrange, multiply = (launches[2 * shard + i][-1] for i in (0, 1))
            assert arrange.x == x[n][shard].data_ptr() and multiply.y == y[shard].data_ptr()
            assert arrange.out == multiply.x and multiply.arena == arena.data_ptr()
            row = (multiply.groups - ours._table.data_ptr()) // 16
            assert row == at["o_proj", layer][shard]
            _, tokens, blocks, where, _ = launches[2 * shard + 1]
            assert (tokens, blocks, where) == (way.kernel.tokens, way.blocks, 7)
            assert (multiply.tokens, multiply.steps, multiply.whole) == (n, way.steps, way.whole)
    assert len(dealt_ways) == 2


# ---- machine code ----


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        pytest.param(KERNELS[0], DType.F16, id="16 tokens, fp16"),
        pytest.param(KERNELS[-1], DType.BF16, id="256 tokens"),
        *(pytest.param(k, DType.BF16, id=f"{k.tokens} tokens", marks=pytest.mark.slow) for k in KERNELS[:-1]),
    ],
)
def test_products_follow_each_other_and_copies_need_no_loop(kernel, dtype):
    code = instructions(sass_of_text(render_product(kernel, dtype) + SOURCE.read_text()))
    name = f"HGMMA.64x{kernel.tokens}x16.F32" + (".BF16" if dtype is DType.BF16 else "")
    products = [what for _, what in code if "HGMMA" in what]
    assert products and all(name in what for what in products)
    # two stages an iteration; a wait behind each for the one before, and for no other
    (loop,) = [body for body in innermost(code, r"\bHGMMA") if any("HGMMA" in w for w in body)]
    assert sum("HGMMA" in what for what in loop) == 2 * 2 * kernel.blocks
    waits = [what for what in loop if "DEPBAR" in what and "gsb0" in what]
    assert len(waits) == 2 and all("0x1" in what for what in waits)
    assert not any(re.search(r"\b(LDL|STL)", what) for what in loop)
    (copies,) = [b for b in innermost(code, r"\bUBLKCP") if sum("UBLKCP" in w for w in b) > 2]
    assert sum("UBLKCP" in what for what in copies) == kernel.rows // 8 // 2
    assert not any("ELECT" in what for what in copies)
