"""Who computes what: the part of a lowering that every backend shares.

A stage's rows are cut into units; a unit is what one block takes at once, and a block's warps may split
K among them. Owners are a function of stage, layer and unit, so that when units do not divide evenly
the blocks that take one more rotate from layer to layer, and none is always the last to finish.

    rank -> group of blocks (one a shard) -> block: units of rows -> warp: a part of K, or rows of a unit
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

import numpy as np

from kog_triton.schedule.schedule import Epilogue, Op, Schedule, Scope, Stage

PADDING = -1  # a row that exists only to fill a unit
Units = TypeVar("Units", int, np.ndarray)


@dataclass(frozen=True)
class Tiling:
    """How one matrix stage is cut below the shard."""

    unit_rows: int  # rows that one block takes at once, in `row_order`
    k_parts: int = 1  # parts of K that are summed in order
    k_step: int = 1  # every part is zero-padded to a multiple of this
    fragment_rows: int = 0  # rows of what one warp multiplies at once, where that is the stage's own
    shift: int = 0  # blocks by which the blocks with one unit more lie further on

    def padded_k(self, cols: int) -> int:
        part = self.k_parts * self.k_step
        return -(-cols // part) * part


@dataclass(frozen=True)
class Partition:
    """Blocks of every rank and the tilings of the matrix stages, by name."""

    schedule: Schedule
    num_blocks: int  # of one rank
    tilings: dict[str, Tiling] = field(hash=False)

    def group_size(self, stage: Stage) -> int:
        """Blocks that share the stage's rows: a shard's own, or all of a rank."""
        shard_only = stage.scope is Scope.SHARD
        return self.num_blocks // (self.schedule.shards_per_rank if shard_only else 1)

    def num_rows(self, stage: Stage, rank: int = 0) -> int:
        """Rows that one group shares: a shard's, or the rank's part of the vocabulary."""
        if stage.scope is Scope.ALL:
            first, last = self.schedule.head_rows(rank)
            return last - first
        return stage.rows

    def num_units(self, stage: Stage, rank: int = 0) -> int:
        return -(-self.num_rows(stage, rank) // self.tilings[stage.name].unit_rows)

    def block_units(self, stage: Stage, layer: int, block: int, rank: int = 0) -> range:
        """Units of the block whose group index is `block`. Consecutive, so that a block publishes a run."""
        return range(*self.unit_bounds(stage, layer, block, rank))

    def unit_bounds(self, stage: Stage, layer: int, block: Units, rank: int = 0) -> tuple[Units, Units]:
        """The first of `block_units` and the one behind the last, of one block or of each of an array of them."""
        size, units = self.group_size(stage), self.num_units(stage, rank)
        # Blocks with one unit more lie evenly spread, so moving on by one block a layer keeps any two
        # blocks within one unit of each other after any number of layers.
        group_index = (block - layer - self.tilings[stage.name].shift) % size
        return group_index * units // size, (group_index + 1) * units // size

    def owner(self, stage: Stage, layer: int, unit: Units, rank: int = 0) -> Units:
        """The group index of the block that computes a unit, or each of an array of units."""
        size, units = self.group_size(stage), self.num_units(stage, rank)
        group_index = ((unit + 1) * size - 1) // units
        return (group_index + layer + self.tilings[stage.name].shift) % size

    def block_rows(self, stage: Stage, layer: int, block: int, rank: int = 0) -> np.ndarray:
        """Row ids that the block computes, in its own order; PADDING where a unit outgrows the stage.

        Ids count the shard's rows as the weights are stacked (gate above up); of the head they count
        from the first row that the rank scores.
        """
        return self.rows_of_blocks(stage, layer, np.array([block]), rank)[0]

    def rows_of_blocks(self, stage: Stage, layer: int, blocks: np.ndarray, rank: int = 0) -> np.ndarray:
        """`block_rows` of blocks with equally many units: int64 [blocks, rows]."""
        unit = self.tilings[stage.name].unit_rows
        first, last = self.unit_bounds(stage, layer, blocks, rank)
        index = first[:, None] * unit + np.arange((last[0] - first[0]) * unit)
        order = row_order(stage, self.num_rows(stage, rank))
        out = np.full(index.shape, PADDING)
        inside = index < len(order)
        out[inside] = order[index[inside]]
        return out


def row_order(stage: Stage, num_rows: int) -> np.ndarray:
    """The order in which a stage's rows are dealt out: gate and up of one output side by side. Not to be written to."""
    return _row_order(stage.epilogue is Epilogue.SILU_MUL, num_rows)


@lru_cache  # asked for by every block of every layer
def _row_order(pairs: bool, num_rows: int) -> np.ndarray:
    rows = np.arange(num_rows)
    order = rows.reshape(2, -1).T.reshape(-1) if pairs else rows
    order.flags.writeable = False
    return order


def matrix_stages(schedule: Schedule) -> list[Stage]:
    return [stage for _, stage in schedule.walk() if stage.op is Op.MATVEC]


def layer_matrices(schedule: Schedule) -> list[Stage]:
    """Those that every layer walks, in order."""
    return [stage for stage in schedule.layer_stages if stage.op is Op.MATVEC]


def default_partition(schedule: Schedule) -> Partition:
    """A small cut that exercises everything: three blocks a shard, units of six rows, K in three parts."""
    tilings = {stage.name: Tiling(6, 3, 4) for stage in matrix_stages(schedule)}
    return Partition(schedule, 3 * schedule.shards_per_rank, tilings)
