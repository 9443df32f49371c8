"""Library prefill of prefill_cases.py's models on several ranks of a CPU: opened, and caches that start as NaN."""

import torch

from kog_triton.backends.embedding import Embedding
from kog_triton.backends.prefill.ranks import RankPrefill, RankTensors
from kog_triton.backends.prefill.weights import Unpacked
from kog_triton.schedule.rope import rope_table
from kog_triton.schedule.schedule import build
from kog_triton.schedule.shards import shard_matrix
from tests.lib.prefill_cases import F32, SPECS, weights_of


class ShardMatrices(Unpacked):
    """A rank's matrices by their definition, from the canonical weights."""

    def __init__(self, weights, schedule, rank, dtype):
        self._weights, self._schedule, self._dtype = weights, schedule, dtype
        each = schedule.shards_per_rank
        self._own = slice(rank * each, (rank + 1) * each)

    def unpack(self, layer, stage):
        found, parts = self._schedule.stage(stage), []
        for name in found.weights:
            canonical = self._weights.load(f"layers.{layer}.{name}").to(self._dtype)
            parts.append(shard_matrix(self._schedule, found, canonical)[self._own])
        if stage == "gate_up_proj":
            return torch.stack(parts, 2).flatten(1, 2)
        return torch.cat(parts, 1)


def rank_prefill_of(name, ranks, dtype=F32, chunk=7, **changes):
    spec, weights = SPECS[name], weights_of(name, dtype)
    schedule = build(spec, ranks)
    rope = torch.from_numpy(rope_table(spec.rope, spec.head_dim, 64))
    embed = weights.load("embed").to(dtype)
    tensors = [
        RankTensors(Embedding.of(embed.clone()), rope, ShardMatrices(weights, schedule, r, dtype)) for r in range(ranks)
    ]
    return RankPrefill(weights, schedule, 64, tensors, chunk, **changes)


def empty_caches(name, ranks, dtype=F32):
    spec, schedule = SPECS[name], build(SPECS[name], ranks)
    shape = (spec.num_layers, schedule.shards_per_rank, schedule.shard_kv_heads, 2, 64, spec.head_dim)
    return [torch.full(shape, torch.nan, dtype=dtype) for _ in range(ranks)]
