"""The order in which a block of the Triton kernel reads its tiles, of every published shape."""

import pytest

from kog_triton.model.shapes import SHAPES, named_shape
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
        own = [(index, tile) for tile in range(stage.ahead, stage.tiles)]
        assert asked == own + [(following, i) for i in range(tiles.stages[following].ahead)]
        assert 1 <= stage.ahead <= min(stage.tiles, MOST_AHEAD)
    first, head = tiles.stages[0], tiles.stages[4]
    assert (first.tile_rows, first.tile_words, first.ahead) == (
        head.tile_rows,
        head.tile_words,
        head.ahead,
    )


def test_small_tiles_are_asked_for_several_at_a_time_and_large_ones_alone():
    ahead = {
        n: [s.ahead for s in lower_tiles(build(named_shape(n)), 128, 4096).stages]
        for n in ("llama-3.2-1b", "qwen3-4b")
    }
    assert ahead == {"llama-3.2-1b": [1, 1, 1, 1, 1], "qwen3-4b": [4, 4, 1, 4, 4]}
