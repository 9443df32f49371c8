"""The layers' matrices out of the weight arena, for torch's matrix products (backends/prefill)."""

import torch

from kog_triton.backends.prefill.weights import Unpacked
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.schedule import Schedule
from kog_triton.schedule.triton import Tiles
from kog_triton.schedule.triton_packing import unpack_tiles

Tensor = torch.Tensor


class TileMatrices(Unpacked):
    """prefill.weights.Matrices of the arena, which holds values of `dtype`."""

    def __init__(self, schedule: Schedule, tiles: Tiles, arena: Tensor, dtype: torch.dtype) -> None:
        self._tiles, self._arena = tiles, arena.view(dtype)
        stages = zip(layer_matrices(schedule), tiles.stages, strict=False)  # the head is no layer's
        self._stages = {stage.name: (stage, tiling) for stage, tiling in stages}

    def unpack(self, layer: int, stage: str) -> Tensor:
        found, tiling = self._stages[stage]
        first = layer * self._tiles.layer_words + tiling.offset
        words = tiling.words * self._tiles.num_blocks
        packed = self._arena[2 * first : 2 * (first + words)].reshape(-1, 2)
        return unpack_tiles(found, tiling, self._tiles.group, packed)
