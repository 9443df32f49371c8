"""Products of prompts with the matrices of the weight arena (prompt.cu)."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.layout.prompt import (
    ARRANGE_THREADS,
    KERNELS,
    ArrangeCall,
    ProductCall,
    ProductKernel,
    deal,
    takes,
)
from kog_triton.backends.cuda.matrices import ArenaMatrices
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.packing import first_ring_slots, group_places, unit_places
from kog_triton.schedule.schedule import Stage

Tensor = torch.Tensor
MOST_GROUPS = 16  # of 8 rows, of a tile: a matrix's table is padded to whole tiles


class ArenaProducts:
    """prefill.weights.Matrices, by the kernels where they read a stage (`layout.prompt.takes`), else unpacked.

    load  makes a function of a kernel ready: the kernel, the function's name, its shared memory
    """

    def __init__(
        self,
        lowering: CudaLowering,
        arena: Tensor,
        dtype: torch.dtype,
        load: Callable[[ProductKernel, str, int], Kernel],
    ) -> None:
        self._lowering, self._arena = lowering, arena
        self._unpacked = ArenaMatrices(lowering, arena, dtype)
        self._most = torch.cuda.get_device_properties(arena.device).multi_processor_count
        self._kernels: Mapping[ProductKernel, Kernel] = {
            k: load(k, "kog_product", k.shared_bytes) for k in KERNELS
        }
        self._arrange = load(KERNELS[0], "kog_arrange", 0)
        self._stages = {s.name: s for s in layer_matrices(lowering.schedule) if takes(lowering, s)}
        table, self._at = group_tables(lowering, self._stages)
        self._table = torch.from_numpy(table).to(arena.device)
        most_bytes = max(k.partial_bytes for k in KERNELS)
        self._partials = torch.empty(self._most * most_bytes // 4, device=arena.device)
        self._arrived = torch.zeros(self._most, dtype=torch.int32, device=arena.device)

    def product(self, layer: int, stage: str, x: Tensor, bias: Tensor | None) -> Tensor:
        if stage not in self._stages:
            return self._unpacked.product(layer, stage, x, bias)
        found = self._stages[stage]
        x = x.contiguous()
        y = x.new_empty(*x.shape[:2], found.rows)
        for shard in range(len(x)):
            groups = self._table[self._at[stage, layer][shard] :]
            self._multiply(found, groups, x[shard], y[shard])
        return y if bias is None else y.add_(bias[:, None])

    @property
    def nbytes(self) -> int:
        held = (self._table, self._partials, self._arrived)
        return sum(t.nbytes for t in held) + self._unpacked.nbytes

    def _multiply(self, stage: Stage, groups: Tensor, x: Tensor, y: Tensor) -> None:
        lo, tokens = self._lowering, len(x)
        way = deal(stage.rows, lo.padded_k(stage), tokens, self._most)
        padded = way.token_tiles * way.kernel.tokens
        parts, steps = lo.tilings[stage.name].k_parts, lo.steps(stage)
        arranged = x.new_empty(padded * lo.padded_k(stage))
        arrange = ArrangeCall(
            x.data_ptr(), arranged.data_ptr(), tokens, padded, stage.cols, parts, steps
        )
        items = padded * parts * steps
        self._arrange.queue(-(-items // ARRANGE_THREADS), ARRANGE_THREADS, arrange)
        call = ProductCall(
            self._arena.data_ptr(),
            groups.data_ptr(),
            arranged.data_ptr(),
            y.data_ptr(),
            self._partials.data_ptr(),
            self._arrived.data_ptr(),
            tokens,
            padded,
            stage.rows,
            way.row_tiles,
            way.token_tiles,
            way.steps,
            way.whole,
            parts.bit_length() - 1,
            lo.fragments,
            lo.num_blocks * lo.fragments,
        )
        self._kernels[way.kernel].queue(way.blocks, way.kernel.threads, call)


def group_tables(
    lowering: CudaLowering, stages: Mapping[str, Stage]
) -> tuple[np.ndarray, dict[tuple[str, int], list[int]]]:
    """`group_places` of all stages and layers, int32 [groups, 4], and the row at which each shard's begins."""
    parts = [np.zeros((0, 4), np.int32)]
    at: dict[tuple[str, int], list[int]] = {}
    count = 0
    for (name, layer), first in first_ring_slots(lowering).items():
        if name not in stages:
            continue
        units = unit_places(lowering, stages[name], layer, first)
        groups = group_places(lowering, stages[name], units)
        groups = np.pad(groups, ((0, 0), (0, -groups.shape[1] % MOST_GROUPS), (0, 0)), mode="edge")
        at[name, layer] = [count + shard * groups.shape[1] for shard in range(len(groups))]
        count += len(groups) * groups.shape[1]
        parts.append(groups.reshape(-1, 4))
    return np.concatenate(parts), at
