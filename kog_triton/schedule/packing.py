"""Weights in the order in which the CUDA lowering reads them, and back.

Bits are only moved, so any 16-bit type packs the same way, and any array that reshapes like numpy's or
torch's will do: packing runs where the weights are.
"""

from typing import Any

import numpy as np

from kog_triton.schedule.cuda import WARPS, CudaLowering
from kog_triton.schedule.lowering import PADDING
from kog_triton.schedule.schedule import Stage

PLACE_BYTES = 64  # that a product's kernel counts in: 32 bits reach 274 GB


def pack_blocks(lowering: CudaLowering, stage: Stage, layer: int, blocks: list[int], rank: int, w: Any) -> Any:
    """Ring slots of one stage, of blocks with equally many units: [blocks, slots, fragments, warps, *fragment].

    `w` [rows, cols] is the shard's matrix, gate above up; of the head, the rows that the rank scores.
    """
    tiling, (high, wide) = lowering.tilings[stage.name], lowering.fragment(stage)
    steps, parts = lowering.steps(stage), tiling.k_parts
    rows = lowering.rows_of_blocks(stage, layer, lowering.group_index(stage, np.array(blocks)), rank)
    count, units = len(blocks), rows.shape[1] // tiling.unit_rows
    flat = new_like(w, (rows.size, lowering.padded_k(stage)))
    real = np.flatnonzero(rows.reshape(-1) != PADDING)
    flat[index_like(w, real), : stage.cols] = w[index_like(w, rows.reshape(-1)[real])]
    # rows: unit, group of warps, row; K: part, step, value  ->  unit, step, group, part, row, value
    shape = (count, units, WARPS // parts, high, parts, steps, wide)
    ordered = permute(flat.reshape(shape), (0, 1, 5, 2, 4, 3, 6))
    slots = -(-units * steps // lowering.fragments)
    out = new_like(w, (count, slots * lowering.fragments, WARPS, high, wide))
    out[:, : units * steps] = ordered.reshape(count, units * steps, WARPS, high, wide)
    return out.reshape(count, slots, lowering.fragments, WARPS, high, wide)


def first_ring_slots(lowering: CudaLowering, rank: int = 0) -> dict[tuple[str, int], np.ndarray]:
    """Of every matrix stage and layer, the ring slot at which the rank's blocks begin it: int64 [num_blocks]."""
    out = {}
    at: np.ndarray = np.zeros(lowering.num_blocks, np.int64)
    for segment in lowering.schedule.segments:
        for layer in range(segment.repeat):
            for stage in segment.stages:
                if stage.name not in lowering.tilings:
                    continue
                out[stage.name, layer] = at
                indices = lowering.group_index(stage, np.arange(lowering.num_blocks))
                at = at + lowering.stage_ring_slots(stage, layer, indices, rank)
    return out


def unit_places(lowering: CudaLowering, stage: Stage, layer: int, first: np.ndarray) -> np.ndarray:
    """Where a stage's units lie in rank 0's arena, int64 [2, shards, units]: the fragment, of all warps, with which
    their block's run of the stage begins, and how many of the run's fragments come before the unit.

    first  the stage's, of `first_ring_slots`
    """
    group, steps = lowering.group_size(stage), lowering.steps(stage)
    units = np.arange(lowering.num_units(stage))
    owners = lowering.owner(stage, layer, units)  # in every shard's group
    blocks = np.arange(lowering.num_blocks).reshape(-1, group)[:, owners]
    begin = (first[blocks] * lowering.num_blocks + blocks) * lowering.fragments
    before = (units - lowering.unit_bounds(stage, layer, owners)[0]) * steps
    return np.stack([begin, np.broadcast_to(before, begin.shape)])


def fragment_places(lowering: CudaLowering, stage: Stage, units: np.ndarray) -> np.ndarray:
    """Where the fragments of `unit_places` lie, int64 [shards, units, steps]: they count fragments of all warps."""
    begin, before = units[..., None]
    slot, inside = np.divmod(before + np.arange(lowering.steps(stage)), lowering.fragments)
    places: np.ndarray = begin + slot * lowering.num_blocks * lowering.fragments + inside
    return places


def group_places(lowering: CudaLowering, stage: Stage, units: np.ndarray) -> np.ndarray:
    """What a product's kernel knows of every group of rows of a fragment, int32 [shards, groups, 4]: where its block's
    run of the stage begins, in 64 bytes (unsigned), how many of its fragments come before the unit, the first warp
    that has its rows, and 0."""
    parts, pack = lowering.tilings[stage.name].k_parts, lowering.weights[stage.name].pack
    begin, before = np.repeat(units, WARPS // parts, 2)
    begin = begin // lowering.fragments * (lowering.ring_slot_bytes // PLACE_BYTES)
    assert begin.max(initial=0) < 2**32
    first = np.tile(np.arange(0, WARPS, parts), units.shape[2])
    groups = [begin, before // pack, np.broadcast_to(first, begin.shape), np.zeros_like(begin)]
    return np.stack(groups, -1).astype(np.int32)


def unpack_stage(lowering: CudaLowering, stage: Stage, arena: Any, places: Any) -> Any:
    """A stage's matrices out of the arena, [shards, rows, cols], rows as they are dealt out (`row_order`).

    arena   any 16-bit type, all of it
    places  `fragment_places`, of the arena's kind of array
    """
    fragments = arena.reshape(-1, lowering.fragment_bytes(stage) // 2)[places.reshape(-1)]
    return order_fragments(lowering, stage, fragments)


def order_fragments(lowering: CudaLowering, stage: Stage, fragments: Any) -> Any:
    """As `unpack_stage`, of all of the stage's fragments in the order of shards, units and K."""
    tiling, (high, wide) = lowering.tilings[stage.name], lowering.fragment(stage)
    units, steps, parts = lowering.num_units(stage), lowering.steps(stage), tiling.k_parts
    shape = (-1, units, steps, WARPS // parts, parts, high, wide)
    ordered = permute(fragments.reshape(shape), (0, 1, 3, 5, 4, 2, 6))
    shards, rows = len(ordered), units * tiling.unit_rows
    return ordered.reshape(shards, rows, lowering.padded_k(stage))[:, : stage.rows, : stage.cols]


def permute(array: Any, axes: tuple[int, ...]) -> Any:
    return array.transpose(axes) if isinstance(array, np.ndarray) else array.permute(axes)


def new_like(like: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    return like.new_zeros(shape)


def index_like(like: Any, rows: np.ndarray) -> Any:
    # Not in the type of the weights: 16 bits would not hold the rows of a vocabulary.
    return rows if isinstance(like, np.ndarray) else like.new_empty(0).long().new_tensor(rows)
