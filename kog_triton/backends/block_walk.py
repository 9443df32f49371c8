"""A matrix stage as a lowering cuts it: rank by rank, block by block, K part by K part."""

import torch

from kog_triton.schedule.lowering import PADDING, Partition
from kog_triton.schedule.schedule import Scope, Stage

Tensor = torch.Tensor


def matvec(partition: Partition, stage: Stage, layer: int, w: Tensor, x: Tensor) -> Tensor:
    """w [S, rows, cols] times x [S, T, cols] as [S, T, rows]; NaN where no block computed a row."""
    tiling = partition.tilings[stage.name]
    out = torch.full((*x.shape[:2], w.shape[1]), torch.nan, device=x.device)
    whole = stage.scope is Scope.ALL  # the head: ranks share the rows, not the shards
    for part in range(partition.schedule.num_ranks if whole else len(w)):
        shard, rank = (0, part) if whole else (part, partition.schedule.rank_of(part))
        first = partition.schedule.head_rows(rank)[0] if whole else 0
        for block in range(partition.group_size(stage)):
            rows = partition.block_rows(stage, layer, block, rank)
            ids = torch.from_numpy(rows[rows != PADDING] + first).to(x.device)
            y = torch.zeros(x.shape[1], len(ids), device=x.device)
            step = tiling.padded_k(x.shape[2]) // tiling.k_parts
            for k in range(0, x.shape[2], step):
                y = y + x[shard][:, k : k + step] @ w[shard][ids][:, k : k + step].float().T
            out[shard][:, ids] = y
    return out
