"""The layers' matrices out of the weight arena, for torch's matrix products (kog_triton/backends/prefill)."""

import torch

from kog_triton.backends.cuda.unpacking import Unpacking
from kog_triton.backends.prefill.weights import Unpacked
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.packing import first_ring_slots, fragment_places, order_fragments, unit_places, unpack_stage

Tensor = torch.Tensor


class ArenaMatrices(Unpacked):
    """prefill.weights.Matrices of a rank's arena, which holds values of `dtype`, or of a narrow model's `unpacking`. A
    layer's lie at the same places in all ranks' arenas: the head alone, which comes last, may differ."""

    def __init__(
        self, lowering: CudaLowering, arena: Tensor, dtype: torch.dtype, unpacking: Unpacking | None = None
    ) -> None:
        self._dtype, self._unpacking = dtype, unpacking
        self._lowering, self._arena, self._first = (lowering, arena.view(dtype), first_ring_slots(lowering))
        self._places: dict[tuple[str, int], Tensor] = {}

    def unpack(self, layer: int, stage: str) -> Tensor:
        found = self._lowering.schedule.stage(stage)
        if self._unpacking is not None:
            return order_fragments(self._lowering, found, self._unpacking.run(layer, stage).view(self._dtype))
        if (stage, layer) not in self._places:
            units = unit_places(self._lowering, found, layer, self._first[stage, layer])
            places = fragment_places(self._lowering, found, units)
            self._places[stage, layer] = torch.from_numpy(places).to(self._arena.device)
        return unpack_stage(self._lowering, found, self._arena, self._places[stage, layer])

    @property
    def nbytes(self) -> int:
        beside = 0 if self._unpacking is None else self._unpacking.nbytes
        return beside + sum(places.nbytes for places in self._places.values())
