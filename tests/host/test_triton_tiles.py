"""The order in which a block of the Triton kernel reads its tiles, of every published shape."""

import pytest

from kog_triton.model.shapes import SHAPES, named_shape
from kog_triton.schedule import triton
from kog_triton.schedule.schedule import build
from kog_triton.schedule.triton import MOST_AHEAD, lower_tiles


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_is_asked_for_once_in_the_order_in_which_it_is_multiplied(shape):
    """A stage finds its first tiles on their way, as many as it keeps there; lm_head's are asked for as qkv_proj's."""
    tiles = lower_tiles(build(named_shape(shape)), 128, 4096)
    for index, stage in enumerate(tiles.stages):
        asked = []
        for tile in range(stage.tiles):
            of, first, count, next_layer = tiles.asked_by(index, tile)
            asked += [(of, first + i) for i in range(count)]
            assert next_layer == (of == 0 and index >= 3)
        following = (index + 1) % 4 if index < 4 else 0
        held = stage.asked_before(0)  # what of it was not asked for is, as the stage begins (matvec.rowwise)
        assert stage.ahead <= held and (stage.ahead == held or index == 4)
        own = [(index, tile) for tile in range(held, stage.tiles)]
        assert asked == own + [(following, i) for i in range(tiles.stages[following].ahead)]
        assert 1 <= held <= min(stage.tiles, MOST_AHEAD)
    first, head = tiles.stages[0], tiles.stages[4]
    assert (first.tile_rows, first.widths, first.ahead) == (head.tile_rows, head.widths, head.ahead)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mixed", [1.0, 1.25, 1.5])
def test_units_of_a_loop_ask_for_what_the_order_says(shape, mixed, monkeypatch):
    """In the loop of the kernel every unit does the same: what is asked for there, counted from its first tile."""
    monkeypatch.setattr(triton, "MIXED", mixed)
    tiles = lower_tiles(build(named_shape(shape)), 128, 4096)
    for index in (0, 2, 4):
        stage = tiles.stages[index]
        for unit in range(stage.looped):
            for k in range(stage.k_tiles):
                first = stage.asked_before(k, True)
                asked = unit * stage.k_tiles + first, stage.asked_before(k + 1, True) - first
                of, *order, next_layer = tiles.asked_by(index, unit * stage.k_tiles + k)
                assert (of, *order, next_layer) == (index, *asked, False)
        assert stage.looped >= stage.units - MOST_AHEAD


@pytest.mark.parametrize("shape", SHAPES)
def test_no_more_is_on_its_way_than_fits(shape):
    """Of all tiles that a block holds at any moment of a layer or the head; one alone may be as large as the best."""
    tiles = lower_tiles(build(named_shape(shape)), 128, 4096)
    most = 1.25 * 64 * 1024
    for layer in ((0, 1, 2, 3), (4,)):
        sizes, held, end = {}, [], 0
        for index in layer:
            stage = tiles.stages[index]
            for tile in range(stage.tiles):
                _, k = stage.place(tile)
                sizes[index, tile] = 4 * stage.tile_rows * stage.widths[k]
        for index in layer:
            stage = tiles.stages[index]
            held += [(index, t) for t in range(stage.asked_before(0)) if (index, t) not in held]
            for tile in range(stage.tiles):
                end = sum(sizes.get(one, 0) for one in held)
                assert len(held) == 1 or end <= most + 64 * 1024, (index, tile)
                of, first, count, _ = tiles.asked_by(index, tile)
                held = held[1:] + [(of, first + i) for i in range(count)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_s_words_are_each_in_one_tile(shape):
    """By where tiles begin: they fill what a block has of the stage, in the order in which they are read."""
    for stage in lower_tiles(build(named_shape(shape)), 128, 4096).stages:
        at = 0
        for tile in range(stage.tiles):
            unit, k = stage.place(tile)
            first, step = stage.begins(k)
            assert first + unit * step == at
            at += stage.tile_rows * stage.widths[k]
        assert at == stage.words
        assert 0 <= 2 * stage.row_words - stage.cols < 2 * stage.widths[0]


def padding(shape, blocks=128):
    """What the stages of a step read beyond the matrices' own bytes, as a share of these."""
    spec = named_shape(shape)
    tiles = lower_tiles(build(spec), blocks, 4096)
    runs = [spec.num_layers] * 4 + [1]
    read = sum(n * s.words * 4 * tiles.num_blocks for s, n in zip(tiles.stages, runs, strict=True))
    lanes = [tiles.lanes] * 4 + [1]
    own = zip(tiles.stages, runs, lanes, strict=True)
    return read / sum(n * s.rows * s.cols * 2 * of for s, n, of in own) - 1


# in percent; of SmolLM2-135M a block has 10 rows of qkv_proj and 6 of o_proj and down_proj
PADDING = {
    "llama-3.2-1b": 0.2, "llama-3.2-3b": 0.1, "llama-3.1-8b": 0.1, "laneformer-2b": 2.3, "tinyllama-1.1b": 0.1,
    "qwen2.5-0.5b": 14.1, "qwen2.5-coder-1.5b": 2.4, "qwen2.5-3b": 1.9, "qwen2.5-7b": 3.3, "qwen3-0.6b": 0.7,
    "qwen3-4b": 0.2, "qwen3-8b": 0.1, "qwen3-14b": 1.6, "smollm2-135m": 19.8, "smollm2-360m": 14.2,
}  # fmt: skip


@pytest.mark.parametrize("shape", PADDING)
def test_a_width_that_is_no_power_of_two_costs_its_bytes(shape):
    assert 100 * padding(shape) <= PADDING[shape]


def test_small_tiles_are_asked_for_several_at_a_time_and_large_ones_alone():
    ahead = {
        n: [s.ahead for s in lower_tiles(build(named_shape(n)), 128, 4096).stages] for n in ("llama-3.2-1b", "qwen3-4b")
    }
    assert ahead == {"llama-3.2-1b": [1, 1, 1, 1, 1], "qwen3-4b": [2, 4, 4, 5, 2]}


def test_layers_whose_matrices_are_nearly_a_tile_have_half_tiles():
    """Of a model whose blocks read 60 KB of a matrix; not of one with 37, 56 and more zeros then, or 232."""
    largest = {
        name: max(
            s.tile_rows * max(s.widths) * 4 // 1024 for s in lower_tiles(build(named_shape(name)), 128, 4096).stages
        )
        for name in ("qwen3-0.6b", "llama-3.2-1b")
    }
    assert largest == {"qwen3-0.6b": 32, "llama-3.2-1b": 64}
    for name in ("smollm2-360m", "qwen2.5-0.5b"):
        schedule = build(named_shape(name))
        best = lower_tiles(schedule, 128, 4096, tile_bytes=64 * 1024)
        assert lower_tiles(schedule, 128, 4096) == best
