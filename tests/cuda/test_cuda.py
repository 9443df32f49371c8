"""The CUDA monokernel without a GPU: its layout, its packing, its source run on a CPU.

The kernel's own C++ runs as fibers (cuda_walk.py), whose blocks drift apart as a seed says; what it computes is
compared with the reference backend, what it samples with the definition.
"""

import re
import subprocess
from itertools import pairwise

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import Head, Reduce
from kog_triton.sampling import History, SamplingParams, sample
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.packing import pack_blocks
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.column_cases import layout_of as columns_of
from tests.lib.cuda_planting import plant
from tests.lib.cuda_walk import FLAGS, HERE, INCLUDE, Walk, compile_walk, header, layout_of, memory
from tests.lib.lowering_cases import FOUR_LANES
from tests.lib.machine_code import SHAPES
from tests.lib.ring_walker import f16_spec, pack_model, spec_of
from tests.lib.slow import some_always

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
LANES = FOUR_LANES | {
    "reduce_attention": (OWN, OWN, DELAYED, DELAYED, NOW),
    "reduce_mlp": (NOW, OWN, DELAYED, OWN, DELAYED),
}


# ---- layout and packing ----


@pytest.mark.parametrize("name", SHAPES)
def test_regions_do_not_overlap_and_shared_memory_fits(name):
    layout = layout_of(named_shape(name), max_context=4096)
    regions = sorted(layout.regions.values(), key=lambda r: r.offset)
    for left, right in pairwise(regions):
        assert left.end <= right.offset
    assert all(r.offset % 32 == 0 and r.stride % 4 == 0 for r in regions)
    assert layout.shared_bytes <= GPUS["h200"].shared_bytes
    assert layout.ring_slots >= 2 * layout.lowering.window_slots


def test_header_carries_the_lowering():
    layout = layout_of(named_shape("llama-3.2-1b"), max_context=1000)
    text = header.render(layout)
    assert "constexpr int kBlocks = 128;" in text
    # a context is an argument of the launch: kernels are compiled once for all of them
    assert text == header.render(layout_of(named_shape("llama-3.2-1b"), max_context=131_072))
    down = re.search(r"struct DownProj \{ static constexpr int (.*?);", text).group(1)
    fields = dict(re.findall(r"k(\w+) = (\d+)", down))
    assert (fields["Rows"], fields["Cols"], fields["Parts"]) == ("2048", "8192", "16")
    assert fields["Units"] == "256" and fields["Steps"] == "16"


@pytest.mark.parametrize("source", ["decode.cu", "columns.cu"])
def test_a_layer_in_another_order_than_the_schedules_does_not_compile(source, tmp_path):
    layout = layout_of(spec_of()) if source == "decode.cu" else columns_of(spec_of(), 2)
    text, generated = header.render(layout), tmp_path / "generated.h"
    order = "Matrices<QkvProj, OProj, GateUpProj, DownProj>"
    assert f"using LayerMatrices = {order};" in text
    generated.write_text(text.replace(order, "Matrices<OProj, QkvProj, GateUpProj, DownProj>"))
    said = subprocess.run(
        ["g++", "-std=c++20", "-fsyntax-only", *FLAGS[source], f'-DGENERATED="{generated}"',
         f"-I{HERE}", f"-I{INCLUDE}", str(HERE / "run.cpp")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode and "static assertion failed: run_layer's order" in said.stderr


@pytest.mark.parametrize("lanes", [False, True])
def test_blocks_pack_together_as_they_do_alone(lanes):
    lowering = lower(build(spec_of(**LANES) if lanes else spec_of()), GPUS["h200"], 12)
    for stage in matrix_stages(lowering.schedule):
        rows = lowering.num_rows(stage)
        w = np.arange(rows * stage.cols, dtype=np.uint16).reshape(rows, stage.cols) + 1
        for layer in range(3):
            units = {}
            for b in range(lowering.group_size(stage)):
                units.setdefault(len(lowering.block_units(stage, layer, b)), []).append(b)
            for blocks in units.values():
                packed = pack_blocks(lowering, stage, layer, blocks, 0, w)
                for block, slots in zip(blocks, packed, strict=True):
                    (alone,) = pack_blocks(lowering, stage, layer, [block], 0, w)
                    assert np.array_equal(slots, alone)


def test_rows_beyond_sixteen_bits_pack():
    spec = spec_of(vocab_size=40_000, hidden_size=16, num_heads=1, num_kv_heads=1)
    lowering = lower(build(spec), GPUS["h200"], 2)
    stage = lowering.schedule.stage("lm_head")
    w = torch.arange(40_000).to(torch.int16)[:, None].expand(-1, 16).contiguous()
    packed = pack_blocks(lowering, stage, 0, [1], 0, w)
    assert np.array_equal(packed, pack_blocks(lowering, stage, 0, [1], 0, w.numpy()))


@pytest.mark.parametrize("lanes", [False, True])
def test_the_arena_is_the_walkers(lanes):
    spec = spec_of(**LANES) if lanes else spec_of(tied_embeddings=True)
    layout, weights = layout_of(spec, 12), RandomWeights(spec)
    arena = memory.allocate(layout, weights, 1, torch.device("cpu")).weights.numpy()
    names = {
        n.format(i): weights.load(n.format(i)).float().numpy() for n in spec.shapes for i in range(spec.num_layers)
    }
    expected = pack_model(layout.lowering, names)[0][0]
    assert np.array_equal(arena, expected)


# ---- the kernel on a CPU ----


def tokens_of(spec, count):
    return np.random.default_rng(0).integers(0, spec.vocab_size, count).tolist()


def assert_close(walk, weights, count, limit):
    """Every position's logits, under two orders of the blocks: equal bits, near the reference."""
    tokens = tokens_of(walk.spec, count)
    ours = walk.forward_logits(tokens)
    assert np.array_equal(ours, walk.forward_logits(tokens, seed=1))
    expected = ReferenceBackend(weights, BackendOptions()).forward_logits(tokens)
    assert expected.std() > 4
    assert np.sqrt(((ours - expected) ** 2).mean()) < limit


PLAIN = {
    "bf16": (spec_of(), {}, 0.06),
    "fp16": (f16_spec(), {}, 0.015),
    "biases, norms, tied": (
        f16_spec(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tied_embeddings=True),
        {},
        0.015,
    ),
    "sizes that divide by nothing": (
        f16_spec(hidden_size=54, intermediate_size=90, num_heads=4, head_dim=8, qkv_bias=True),
        {},
        0.015,
    ),
    "ring slots that end within units, which some blocks have more of": (
        f16_spec(hidden_size=88, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=510),
        {"num_blocks": 7},
        0.02,
    ),
    "weights of two stages ahead, which some blocks have more of": (
        f16_spec(hidden_size=88, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=510),
        {"num_blocks": 7, "streams": "true"},
        0.02,
    ),
    "ring slots of three fragments": (
        f16_spec(hidden_size=1536, intermediate_size=192, vocab_size=64, num_layers=2),
        {"num_blocks": 12, "streams": "true"},
        0.02,
    ),
    "windows, splits": (f16_spec(windows=(5, 0, 3)), {"split_least": 2}, 0.015),
    "splits of so many heads that a thread stages eight values": (
        f16_spec(hidden_size=40, num_heads=66, num_kv_heads=2, head_dim=64, intermediate_size=64),
        {"split_least": 4},
        0.02,
    ),
    "joins of many splits by several warps": (
        f16_spec(hidden_size=88, num_heads=6, num_kv_heads=1, head_dim=24),
        {"split_least": 1, "merged_length": 11},
        0.02,
    ),
    "joins of many splits by one warp": (
        f16_spec(hidden_size=40, num_heads=6, num_kv_heads=1, windows=(3, 0, 7)),
        {"split_least": 1, "merged_length": 5},
        0.02,
    ),
}


@pytest.mark.parametrize(
    "name",
    some_always(
        PLAIN,
        "bf16",
        "fp16",
        "sizes that divide by nothing",
        "ring slots that end within units, which some blocks have more of",
        "windows, splits",
        "splits of so many heads that a thread stages eight values",
        "joins of many splits by several warps",
    ),
)
def test_plain_models_agree_with_the_reference(name):
    spec, options, limit = PLAIN[name]
    weights = RandomWeights(spec)
    tokens = 14 if "split_least" in options else 5
    assert_close(Walk(spec, weights, **options), weights, tokens, limit)


def long_span_spec():
    """72 query heads leave a round of the walk one tile of 16 positions: 60 of them are four rounds."""
    return f16_spec(num_layers=2, hidden_size=24, intermediate_size=32, num_heads=72, num_kv_heads=1, head_dim=8)


def test_a_long_span_is_fetched_tile_by_tile_and_weights_go_on_behind_it():
    spec = long_span_spec()
    weights, layers, tile, tokens = RandomWeights(spec), spec.num_layers, 16, 60
    walk = Walk(spec, weights, 1)
    assert_close(walk, weights, tokens, 0.02)
    fetched = walk.fetches()

    def offsets(tensor):
        """Of what was fetched from it; -1 where it was not."""
        at = fetched[:, 0] - tensor.data_ptr()
        return np.where((at >= 0) & (at + fetched[:, 1] <= tensor.nbytes), at, -1)

    slots, rows = offsets(walk.memory.weights), offsets(walk.memory.cache)
    assert ((slots >= 0) ^ (rows >= 0)).all()
    positions = walk.layout.max_context
    row_bytes = walk.memory.cache.nbytes // (layers * 2 * positions)
    home, row = np.divmod(rows // row_bytes, positions)  # a layer's keys or values
    tiles = (rows >= 0) & (row > 0)
    assert (fetched[tiles, 1] == tile * row_bytes).all()
    for which in range(2 * layers):  # all that is full before the newest position
        assert set(row[tiles & (home == which)]) == {tile, 2 * tile}
    # Walks of three rounds and more keep weights back, and let them go on in the end.
    first_tile = np.flatnonzero(tiles)[0]
    assert (slots[first_tile:] >= 0).any()


def test_a_long_span_keeps_weights_back(tmp_path):
    """Every copy to the ring that is asked for while one is walked is noted, by a fetch of seven bytes."""
    asks = "    bulk_load(b.ring + next.slot"
    noted = ("ring.h", asks, f"    if (load_volatile(&b.small->walks) != 0) fetch_to_l2(from, 7);\n{asks}")
    spec = long_span_spec()
    walk, tokens = Walk(spec, RandomWeights(spec), 1), tokens_of(spec, 60)
    for edits, early in ((noted,), False), ((noted, ("ring.h", " && walks == 0", "")), True):
        folder = tmp_path / str(early)
        folder.mkdir()
        walk.library = compile_walk(walk.layout, include=plant(folder, *edits))
        walk.forward_logits(tokens)
        assert (walk.fetches()[:, 1] == 7).any() == early


@pytest.mark.parametrize("head", some_always(Head, Head.MEAN, Head.VOCAB_PARALLEL))
def test_lanes_agree_with_the_reference(head):
    spec = f16_spec(**LANES, head=head, lane_norms=head is Head.MEAN)
    weights = RandomWeights(spec)
    assert_close(Walk(spec, weights, 8), weights, 4, 0.02)


def test_a_lane_runs_ahead_by_the_buffers_of_each_module():
    """Each module's delayed outputs have buffers of their own number. A lane whose stores land late falls behind."""
    lanes = {"num_layers": 7, "delay": 1, "reduce_mlp": (OWN,) * 7}
    spec = f16_spec(**LANES | lanes | {"reduce_attention": (OWN, OWN, DELAYED) + (OWN,) * 4})
    weights = RandomWeights(spec)
    walk, tokens = Walk(spec, weights, 4), tokens_of(spec, 2)
    regions = walk.layout.regions
    assert regions["attention_out_delayed"].buffers > regions["mlp_out_delayed"].buffers
    expected = walk.forward_logits(tokens)
    walk.store_late("mlp_out", 300, rows=1)
    assert np.array_equal(walk.forward_logits(tokens, limit=1 << 15), expected)


@pytest.mark.parametrize("region", ["attention", "splits", "split_tops"])
def test_stores_that_land_late_change_nothing(region):
    """A word's writers change from layer to layer: only what they have read of it orders their stores."""
    spec, options, _ = PLAIN["joins of many splits by one warp"]
    walk, tokens = Walk(spec, RandomWeights(spec), **options), tokens_of(spec, 10)
    expected = walk.forward_logits(tokens)
    walk.store_late(region, rounds=100)  # some layers
    assert np.array_equal(walk.forward_logits(tokens, seed=1, limit=4000), expected)


def test_the_producers_counts_never_wrap(tmp_path):
    """Counts of eight bits would, after as many tokens of this model as counts of 32 after many of a large one."""
    spec = f16_spec()
    walk, tokens = Walk(spec, RandomWeights(spec), num_blocks=2), tokens_of(spec, 24)
    assert walk.layout.lowering.stream_ring_slots() * len(tokens) > 256 + 50
    expected = walk.forward_logits(tokens)
    counts = (("ring.h", f"u32 {name} = 0;", f"u8 {name} = 0;") for name in ("count", "fetched"))
    walk.library = compile_walk(walk.layout, include=plant(tmp_path, *counts))
    assert np.array_equal(walk.forward_logits(tokens), expected)


@pytest.fixture(scope="module")
def walk():
    spec = f16_spec()
    return Walk(spec, RandomWeights(spec))


def expected_tokens(walk, prompt, count, params):
    """Sampling by the definition on the kernel's own logits."""
    history, out = History(tuple(prompt)), list(prompt)
    for _ in range(count):
        logits = walk.forward_logits(out)[-1]
        out.append(sample(logits, params, history, len(out)).token)
    return out[len(prompt) :]


def test_greedy_tokens_are_the_largest_logits(walk):
    prompt = tokens_of(walk.spec, 3)
    tokens, outcome = walk.generate(prompt, 4, seed=1)
    assert tokens == expected_tokens(walk, prompt, 4, SamplingParams(temperature=0))
    assert outcome == 2


def test_sampled_tokens_are_the_definitions(walk):
    prompt, seed = tokens_of(walk.spec, 3), (7 << 40) + 12345
    params = SamplingParams(temperature=3.0, seed=seed)
    tokens, _ = walk.generate(prompt, 4, params)
    assert tokens == expected_tokens(walk, prompt, 4, params)
    assert tokens != walk.generate(prompt, 4)[0]


def test_a_stop_id_ends_the_request(walk):
    prompt = tokens_of(walk.spec, 3)
    plain, _ = walk.generate(prompt, 4)
    tokens, outcome = walk.generate(prompt, 4, stops=(500, plain[1]))
    assert (tokens, outcome) == (plain[: plain.index(plain[1]) + 1], 1)


def test_the_hosts_word_ends_the_request(walk):
    tokens, outcome = walk.generate(tokens_of(walk.spec, 2), 4, control=3)
    assert (len(tokens), outcome) == (1, 3)


def test_a_nan_ends_the_request():
    spec = f16_spec()
    walk = Walk(spec, RandomWeights(spec))
    walk.memory.embed[5, 3] = torch.nan
    walk.run(walk.words([1, 5], 4), [1, 5])
    assert (walk.outcome, walk.tokens()) == (5, [-1])
    assert not walk.memory.error.any()


def test_a_block_that_hangs_ends_the_launch(walk):
    """Every other block gives up in bounded time, the first one says where, and no token comes out."""
    absent = walk.layout.lowering.num_blocks - 1
    rounds = walk.run(walk.words([1, 2], 40), [1, 2], seed=3, limit=2000, absent=absent)
    assert 2000 < rounds < 4000  # which the emulated GPU's clock counts, and an SM's does not
    flag, block, step, layer, word, seen, wanted = walk.memory.error.tolist()[:7]
    assert flag == 1 and block != absent and layer == 0
    place = walk.layout.place_of(header.STEPS[step], word)
    assert re.fullmatch(r"attention_qkv, word \d+ of qkv|attention_join.*|o_proj_input, word \d+ of splits", place)
    assert (seen, wanted) == (0, 1)  # a word that nobody wrote
    assert (walk.outcome, walk.tokens()) == (4, [])
    assert walk.generate(tokens_of(walk.spec, 3), 2)[1] == 2  # and the next request runs


def test_a_wait_for_the_hosts_mask_is_no_word_of_the_blocks(walk):
    """Its place counts the host's words, whose numbers are those of other exchanges as well."""
    assert walk.layout.place_of("mask", 3) == "mask, word 3 of the host's"
    assert walk.layout.place_of("attention_qkv", 3) == "attention_qkv, word 3 of qkv"
