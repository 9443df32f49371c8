"""The layers' matrices out of the weight arena, for torch's matrix products (backends/prefill)."""

import torch

from kog_triton.backends.prefill.weights import Unpacked
from kog_triton.backends.triton.host.narrow_tiles import unpack_narrow_tiles
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.schedule import Schedule
from kog_triton.schedule.triton import Tiles
from kog_triton.schedule.triton_packing import unpack_tiles

Tensor = torch.Tensor


class TileMatrices(Unpacked):
    """prefill.weights.Matrices of the arena, as values of `dtype`: those that it holds, or what its codes stand for."""

    def __init__(self, schedule: Schedule, tiles: Tiles, arena: Tensor, dtype: torch.dtype) -> None:
        self._tiles, self._arena, self._dtype = tiles, arena, dtype
        stages = zip(layer_matrices(schedule), tiles.stages, strict=False)  # the head is no layer's
        self._stages = {stage.name: (stage, tiling) for stage, tiling in stages}

    def unpack(self, layer: int, stage: str) -> Tensor:
        found, tiling = self._stages[stage]
        first = layer * self._tiles.layer_words + tiling.offset
        words = tiling.words * self._tiles.num_blocks
        packed = self._arena[first : first + words]
        if tiling.is_narrow:
            return unpack_narrow_tiles(tiling, self._tiles.sizes.warps, self._tiles.group, packed, self._dtype)
        pairs = packed.view(self._dtype).reshape(-1, 2)
        return unpack_tiles(found, tiling, self._tiles.group, pairs)
