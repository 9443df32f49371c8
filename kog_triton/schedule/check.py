"""Refuse a schedule or a lowering that a kernel could not run: better an error here than a hung GPU.

every stage reads what an earlier one wrote
every row has one owner; owner() and block_units() agree
shared memory suffices and all blocks are resident

What blocks exchange depends on the kernel: exchanges.py proves it.
"""

from itertools import chain

import numpy as np

from kog_triton.errors import ModelError
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.lowering import PADDING, Partition
from kog_triton.schedule.schedule import Epilogue, Op, Schedule, Stage


def check_schedule(schedule: Schedule) -> None:
    """ModelError naming the first stage that breaks a rule."""
    stages = [stage for _, stage in schedule.walk()]
    names = [s.name for s in stages]
    if len(set(names)) < len(names):
        raise ModelError(f"two stages share the name {max(names, key=names.count)}")
    written = {"token"}
    for stage in stages:
        if stage.op is Op.MATVEC and not stage.weights:
            raise ModelError(f"{stage.name}: a matrix stage without weights")
        if stage.source not in written:
            raise ModelError(f"{stage.name}: reads {stage.source}, which nothing has written yet")
        written.add(stage.target)


def check_partition(partition: Partition) -> None:
    """Every row has one owner, in every layer and rank; ModelError naming the stage if not."""
    schedule = partition.schedule
    for segment, stage in schedule.walk():
        if stage.op is not Op.MATVEC:
            continue
        if stage.name not in partition.tilings:
            raise ModelError(f"{stage.name}: no tiling")
        unit_rows = partition.tilings[stage.name].unit_rows
        if unit_rows % 2 and stage.outputs != stage.rows:
            raise ModelError(f"{stage.name}: a unit of {unit_rows} rows splits a (gate, up) pair")
        residual = stage.epilogue is Epilogue.RESIDUAL
        if residual and partition.num_units(stage) < partition.group_size(stage):
            raise ModelError(
                f"{stage.name}: {partition.num_units(stage)} units for {partition.group_size(stage)} blocks; "
                "a block without rows of the residual stream could be overtaken by the others"
            )
        for layer in range(segment.repeat):
            for rank in range(schedule.num_ranks):
                _check_layer(partition, stage, layer, rank)


def _check_layer(partition: Partition, stage: Stage, layer: int, rank: int) -> None:
    blocks = np.arange(partition.group_size(stage))
    owned = [partition.block_units(stage, layer, block, rank) for block in range(len(blocks))]
    units = np.fromiter(chain.from_iterable(owned), np.int64)
    owners = np.repeat(blocks, [len(own) for own in owned])
    wrong = owners[partition.owner(stage, layer, units, rank) != owners]
    if len(wrong):
        raise ModelError(f"{stage.name}: owner and block {wrong[0]} disagree")
    whole = np.array_equal(np.sort(units), np.arange(partition.num_units(stage, rank)))
    if whole and layer == 0:  # a unit has the same rows in every layer
        rows = np.sort(np.concatenate([partition.block_rows(stage, layer, b, rank) for b in range(len(blocks))]))
        rows = rows[rows != PADDING]
        whole = np.array_equal(rows, np.arange(partition.num_rows(stage, rank)))
    if not whole:
        raise ModelError(f"{stage.name}: rows without exactly one owner in layer {layer}")


def check_lowering(lowering: CudaLowering) -> None:
    """Everything that a launch needs: schedule, rows, shared memory, resident blocks."""
    gpu = lowering.gpu
    if lowering.num_blocks > gpu.num_sms:
        raise ModelError(f"{lowering.num_blocks} blocks are not resident on {gpu.num_sms} SMs")
    if lowering.num_blocks < lowering.schedule.shards_per_rank:
        raise ModelError(f"{lowering.num_blocks} blocks cannot hold {lowering.schedule.shards_per_rank} lanes")
    check_schedule(lowering.schedule)
    check_partition(lowering)
    if lowering.ring_slots < lowering.least_ring_slots:
        raise ModelError(
            f"shared memory of {gpu.name}: {lowering.fixed_shared_bytes} bytes beside the ring leave "
            f"{lowering.ring_slots} ring slots, {lowering.least_ring_slots} are needed"
        )
