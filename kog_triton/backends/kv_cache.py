"""Keys and values of every slot, float32, for the reference backend. Grows by doubling, never shrinks."""

import torch

from kog_triton.model.spec import ModelSpec

Tensor = torch.Tensor


class KVCache:
    def __init__(self, spec: ModelSpec, shards: int, num_slots: int, device: torch.device) -> None:
        self._shape = (shards, spec.num_kv_heads // shards, spec.head_dim)
        self._layers, self._slots, self._device = spec.num_layers, num_slots, device
        self._size = 0
        self._data: list[Tensor] = []  # a layer: [slots, 2, S, K, positions, d]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._data)

    def reserve(self, positions: int) -> None:
        """Make room for positions 0 .. positions - 1 in every slot."""
        if positions <= self._size:
            return
        size = max(positions, 2 * self._size, 256)
        shards, kv, d = self._shape
        data = [
            torch.zeros(self._slots, 2, shards, kv, size, d, device=self._device)
            for _ in range(self._layers)
        ]
        for new, old in zip(data, self._data, strict=False):
            new[..., : self._size, :] = old
        self._data = data
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
