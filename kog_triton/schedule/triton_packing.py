"""Weights in the order in which the Triton lowering reads them, and back; runs on numpy's arrays or torch's."""

from collections.abc import Iterator, Sequence
from typing import Any

from kog_triton.schedule.lowering import row_order
from kog_triton.schedule.schedule import Epilogue, Stage
from kog_triton.schedule.triton import StageTiles


def pack_tiles(stage: Stage, t: StageTiles, group: int, shards: Any) -> Any:
    """All blocks' tiles of one stage, one after the other, those of all blocks side by side: [words of all, 2].

    `shards` [S, rows, cols] are the matrices of the lanes on this GPU, gate above up; of a head that all
    blocks share, there is one, and `group` counts all of them.
    """
    shards_on, rows, cols = shards.shape
    order = row_order(stage, rows)
    if stage.epilogue is Epilogue.SILU_MUL:
        shards = shards[:, order.tolist()]
    padded = _zeros(shards, (shards_on, group * t.block_rows, 2 * t.row_words))
    padded[:, :rows, :cols] = shards
    given = padded.reshape(shards_on, group, t.units, t.tile_rows, t.row_words, 2)
    packed = _zeros(shards, (shards_on * group * t.words, 2))
    for k, tiles in tiles_of(t, shards_on * group, packed):
        part = given[..., t.first_word(k) : t.first_word(k) + t.widths[k], :]
        tiles[...] = _permute(part, (2, 0, 1, 3, 4, 5)).reshape(tiles.shape)
    return packed


def unpack_tiles(stage: Stage, t: StageTiles, group: int, packed: Any) -> Any:
    """What `pack_tiles` was given, [S, rows, cols], but rows as they are dealt out (`row_order`)."""
    shards_on = len(packed) // (group * t.words)
    padded = _zeros(packed, (shards_on, group, t.units, t.tile_rows, t.row_words, 2))
    for k, tiles in tiles_of(t, shards_on * group, packed):
        part = tiles.reshape(t.units, shards_on, group, t.tile_rows, t.widths[k], 2)
        padded[..., t.first_word(k) : t.first_word(k) + t.widths[k], :] = _permute(part, (1, 2, 0, 3, 4, 5))
    shape = (shards_on, group * t.block_rows, 2 * t.row_words)
    return padded.reshape(shape)[:, : stage.rows, : stage.cols]


def tiles_of(t: StageTiles, blocks: int, packed: Any) -> Iterator[tuple[int, Any]]:
    """Each tile along K, and where those of all units stand: a view [units, words, values of a word]."""
    for k in range(t.k_tiles):
        first, step = t.begins(k)
        whole = t.units * step if t.wired else t.words  # in which they lie `step` words apart
        begin = blocks * (first if t.wired else 0)
        inside = 0 if t.wired else blocks * first
        run = packed[begin : begin + blocks * whole].reshape(t.units, blocks * step, packed.shape[-1])
        yield k, run[:, inside : inside + blocks * t.tile_words(k)]


def _permute(array: Any, axes: Sequence[int]) -> Any:
    return array.permute(*axes) if hasattr(array, "permute") else array.transpose(axes)


def _zeros(like: Any, shape: tuple[int, ...]) -> Any:
    if hasattr(like, "new_zeros"):
        return like.new_zeros(shape)
    import numpy as np

    return np.zeros(shape, like.dtype)
