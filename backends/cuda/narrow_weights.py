"""Narrow weights of a checkpoint as the packing takes them: a matrix a shard, with a row's scales as bytes."""

import torch

from kog_triton.backends.narrow import LoadNarrow, Narrow
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.narrow_packing import NarrowMatrix, scales_by_row
from kog_triton.schedule.schedule import Axis, Scope, Stage
from kog_triton.schedule.shards import canonical, shard_matrix

Tensor = torch.Tensor


def narrow_matrices(lo: CudaLowering, stage: Stage, layer: int, get: LoadNarrow) -> list[NarrowMatrix]:
    """A stage's codes and scales, a shard each: the matrices that the stage stacks, one above the other. Of the head
    one, all of it."""
    parts = [get(canonical(stage, name, layer)) for name in stage.weights]

    def stored(values: list[Tensor]) -> Tensor:
        of_rows = [_by_row(p, v) for p, v in zip(parts, values, strict=True)]
        by_row = torch.cat([_shard_groups(lo, stage, t) for t in of_rows], -2).contiguous()
        return by_row.view(torch.uint8).unflatten(-1, (-1, by_row.element_size()))

    codes = torch.cat([shard_matrix(lo.schedule, stage, part.codes.view(torch.uint8)) for part in parts], -2)
    scales = stored([part.scales for part in parts])
    beside = [part.offsets for part in parts if part.offsets is not None]
    if not beside:
        return [NarrowMatrix(c, s) for c, s in zip(codes, scales, strict=True)]
    return [NarrowMatrix(*shard) for shard in zip(codes, scales, stored(beside), strict=True)]


def scales_of_rows(part: Narrow) -> Tensor:
    """A row's scales, float32 [lanes, rows, groups along K]."""
    return _by_row(part, part.scale_values())


def _shard_groups(lo: CudaLowering, stage: Stage, groups: Tensor) -> Tensor:
    """[lanes, rows, groups along K] as [shards, rows, those of a shard's K]. One group is every shard's."""
    shards = lo.schedule.num_shards
    if stage.scope is Scope.ALL or len(groups) == shards:
        return groups
    if stage.cut is Axis.ROWS:
        by_row: Tensor = shard_matrix(lo.schedule, stage, groups)
        return by_row
    if groups.shape[-1] == 1:
        return groups.expand(shards, -1, -1)
    return groups[0].unflatten(-1, (shards, -1)).transpose(0, 1)


def _by_row(part: Narrow, groups: Tensor) -> Tensor:
    """What a scale group has, a row: [lanes, rows, groups along K]."""
    by_row: Tensor = scales_by_row(part.format.group_rows, groups, part.codes.shape[-2])
    return by_row if by_row.ndim == 3 else by_row[None]
