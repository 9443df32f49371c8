"""Keys and values of every slot, float32, for the reference backend.

A slot has none until it is used, grows by doubling up to `limit` positions and never shrinks. While it grows, one of
its layers at a time is held twice.
"""

import torch

from kog_triton.errors import RequestError
from kog_triton.schedule.schedule import Schedule

Tensor = torch.Tensor


class KVCache:
    def __init__(self, schedule: Schedule, num_slots: int, limit: int, device: torch.device) -> None:
        spec = schedule.spec
        empty = torch.empty(2, schedule.num_shards, schedule.shard_kv_heads, 0, spec.head_dim, device=device)
        self._limit = limit
        # by slot and layer: [2, S, K, positions, d]
        self._data = [[empty] * spec.num_layers for _ in range(num_slots)]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for layers in self._data for t in layers)

    def reserve(self, slot: int, positions: int) -> None:
        """Make room for positions 0 .. positions - 1 in a slot; RequestError beyond `limit`."""
        layers = self._data[slot]
        had = layers[-1].shape[3]  # the last one grows last: the others may have grown before memory ran out
        if positions <= had:
            return
        if positions > self._limit:
            raise RequestError(f"{positions} positions do not fit a slot of {self._limit}")
        size = min(max(positions, 2 * had, 256), self._limit)
        for layer, old in enumerate(layers):
            layers[layer] = old.new_zeros(*old.shape[:3], size, old.shape[4])
            layers[layer][..., :had, :] = old[..., :had, :]

    def append(self, layer: int, slot: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [S, K, T, d] at positions start..; all keys and values so far [S, K, n, d]."""
        end = start + k.shape[2]
        home = self._data[slot][layer]
        home[0, :, :, start:end] = k
        home[1, :, :, start:end] = v
        return home[0, :, :, :end], home[1, :, :, :end]

    def clear(self) -> None:
        self._data.clear()
