"""Keys and values of every slot, float32, for the reference backend.

Grows by doubling up to `limit` positions a slot and never shrinks. While it grows, one layer at a
time is held twice.
"""

import torch

from kog_triton.errors import RequestError
from kog_triton.schedule.schedule import Schedule

Tensor = torch.Tensor


class KVCache:
    def __init__(
        self, schedule: Schedule, num_slots: int, limit: int, device: torch.device
    ) -> None:
        spec = schedule.spec
        self._shape = (schedule.num_shards, schedule.shard_kv_heads, spec.head_dim)
        self._slots, self._limit, self._device = num_slots, limit, device
        self._num_layers = spec.num_layers
        self._size = 0
        self._data: list[Tensor] = []  # a layer: [slots, 2, S, K, positions, d]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._data)

    def reserve(self, positions: int) -> None:
        """Make room for positions 0 .. positions - 1 in every slot; RequestError beyond `limit`."""
        if positions <= self._size:
            return
        if positions > self._limit:
            raise RequestError(f"{positions} positions do not fit a slot of {self._limit}")
        size = min(max(positions, 2 * self._size, 256), self._limit)
        shards, kv, d = self._shape
        if not self._data:
            empty = torch.empty(self._slots, 2, shards, kv, 0, d, device=self._device)
            self._data = [empty] * self._num_layers
        for layer, old in enumerate(self._data):
            new = torch.zeros(self._slots, 2, shards, kv, size, d, device=self._device)
            new[..., : self._size, :] = old[..., : self._size, :]
            self._data[layer] = new
        self._size = size

    def append(
        self, layer: int, slot: int, start: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store k and v [S, K, T, d] at positions start..; all keys and values so far [S, K, n, d]."""
        end = start + k.shape[2]
        home = self._data[layer][slot]
        home[0, :, :, start:end] = k
        home[1, :, :, start:end] = v
        return home[0, :, :, :end], home[1, :, :, :end]

    def clear(self) -> None:
        self._data.clear()
        self._size = 0
