"""Weights in the order in which the Triton lowering reads them, and back; runs on numpy's arrays or torch's."""

from collections.abc import Sequence
from typing import Any

from kog_triton.schedule.lowering import row_order
from kog_triton.schedule.schedule import Epilogue, Stage
from kog_triton.schedule.triton import StageTiles


def pack_tiles(stage: Stage, t: StageTiles, group: int, shards: Any) -> Any:
    """All blocks' tiles of one stage, [tiles, blocks, tile_rows, 2 * tile_words].

    `shards` [S, rows, cols] are the matrices of the lanes on this GPU, gate above up; of a head that all
    blocks share, there is one, and `group` counts all of them.
    """
    shards_on, rows, cols = shards.shape
    order = row_order(stage, rows)
    if stage.epilogue is Epilogue.SILU_MUL:
        shards = shards[:, order.tolist()]
    padded = _zeros(shards, (shards_on, group * t.block_rows, t.k_tiles * 2 * t.tile_words))
    padded[:, :rows, :cols] = shards
    shape = (shards_on, group, t.units, t.tile_rows, t.k_tiles, 2 * t.tile_words)
    tiles = _permute(padded.reshape(shape), _axes(stage))
    return tiles.reshape(t.tiles, shards_on * group, t.tile_rows, 2 * t.tile_words)


def unpack_tiles(stage: Stage, t: StageTiles, group: int, packed: Any) -> Any:
    """What `pack_tiles` was given, [S, rows, cols], but rows as they are dealt out (`row_order`)."""
    sizes = (packed.shape[1] // group, group, t.units, t.tile_rows, t.k_tiles, 2 * t.tile_words)
    axes = _axes(stage)
    tiles = packed.reshape([sizes[axis] for axis in axes])
    shards = _permute(tiles, sorted(range(6), key=axes.__getitem__))
    shape = (sizes[0], group * t.block_rows, t.k_tiles * 2 * t.tile_words)
    return shards.reshape(shape)[:, : stage.rows, : stage.cols]


def _axes(stage: Stage) -> tuple[int, ...]:
    """Of [S, group, units, tile_rows, k_tiles, values], in the order in which they are packed."""
    # stages that gather their input go K tile by K tile, the others row tile by row tile
    wired = stage.epilogue is Epilogue.RESIDUAL
    return (4, 2, 0, 1, 3, 5) if wired else (2, 4, 0, 1, 3, 5)


def _permute(array: Any, axes: Sequence[int]) -> Any:
    return array.permute(*axes) if hasattr(array, "permute") else array.transpose(axes)


def _zeros(like: Any, shape: tuple[int, ...]) -> Any:
    if hasattr(like, "new_zeros"):
        return like.new_zeros(shape)
    import numpy as np

    return np.zeros(shape, like.dtype)
