"""Weights in the order in which the CUDA lowering reads them.

Bits are only moved, so any 16-bit type packs the same way, and any array that reshapes like numpy's or
torch's will do: packing runs where the weights are.
"""

from typing import Any

import numpy as np

from kog_triton.schedule.cuda import WARPS, CudaLowering
from kog_triton.schedule.lowering import PADDING
from kog_triton.schedule.schedule import Stage


def pack_blocks(
    lowering: CudaLowering, stage: Stage, layer: int, blocks: list[int], rank: int, w: Any
) -> Any:
    """Ring slots of one stage, of blocks with equally many units: [blocks, slots, fragments, warps, *fragment].

    `w` [rows, cols] is the shard's matrix, gate above up; of the head, the rows that the rank scores.
    """
    tiling, (high, wide) = lowering.tilings[stage.name], lowering.fragment(stage)
    steps, parts = lowering.steps(stage), tiling.k_parts
    rows = np.stack(
        [lowering.block_rows(stage, layer, lowering.group_index(stage, b), rank) for b in blocks]
    )
    count, units = len(blocks), rows.shape[1] // tiling.unit_rows
    flat = _new(w, (rows.size, lowering.padded_k(stage)))
    real = np.flatnonzero(rows.reshape(-1) != PADDING)
    flat[_index(w, real), : stage.cols] = w[_index(w, rows.reshape(-1)[real])]
    # rows: unit, group of warps, row; K: part, step, value  ->  unit, step, group, part, row, value
    shape = (count, units, WARPS // parts, high, parts, steps, wide)
    ordered = _permute(flat.reshape(shape), (0, 1, 5, 2, 4, 3, 6))
    slots = -(-units * steps // lowering.fragments)
    out = _new(w, (count, slots * lowering.fragments, WARPS, high, wide))
    out[:, : units * steps] = ordered.reshape(count, units * steps, WARPS, high, wide)
    return out.reshape(count, slots, lowering.fragments, WARPS, high, wide)


def _permute(array: Any, axes: tuple[int, ...]) -> Any:
    return array.transpose(axes) if isinstance(array, np.ndarray) else array.permute(axes)


def _new(like: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    return like.new_zeros(shape)


def _index(like: Any, rows: np.ndarray) -> Any:
    # Not in the type of the weights: 16 bits would not hold the rows of a vocabulary.
    return rows if isinstance(like, np.ndarray) else like.new_empty(0).long().new_tensor(rows)
