"""Products of prompts with the matrices of the weight arena (prompt.cu)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.cuda.layout.header import row_scales_at
from kog_triton.backends.cuda.layout.prompt import (
    ARRANGE_THREADS,
    ArrangeCall,
    ProductCall,
    ProductKernel,
    deal,
    product_kernels,
    ring_slot_steps,
    takes,
)
from kog_triton.backends.cuda.matrices import ArenaMatrices
from kog_triton.backends.cuda.unpacking import Unpacking
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.packing import first_ring_slots, group_places, unit_places
from kog_triton.schedule.schedule import Stage

Tensor = torch.Tensor
MOST_GROUPS = 16  # of 8 rows, of a tile: a matrix's table is padded to whole tiles
MOST_READY = 256  # 2 KB each: four stages of chunks, buckets and some ends of prompts


@dataclass(frozen=True)
class Ready:
    """A stage's launches for one number of tokens. Of their arguments only addresses differ from call to call: to make
    these launches anew each time took a thread as long as a small model's GPU (benchmarks/cuda-log.md#eager-host).

    arranged  values of x as the kernel takes it
    """

    rows: int
    cols: int
    arranged: int
    arrange_call: ArrangeCall
    call: ProductCall
    arrange: Callable[[int], None]
    multiply: Callable[[int], None]


class ArenaProducts:
    """prefill.weights.Matrices, by the kernels where they read a stage (`layout.prompt.takes`), else unpacked.

    load       makes a function of a kernel ready: the kernel, the function's name, its shared memory
    unpacking  of narrow stages that the kernels do not read
    biases     the decode kernel's, with the scales of rows (memory.py)
    rank       whose arena it is
    """

    def __init__(
        self,
        lowering: CudaLowering,
        arena: Tensor,
        dtype: torch.dtype,
        load: Callable[[ProductKernel, str, int], Kernel],
        biases: Tensor,
        unpacking: Unpacking | None = None,
        rank: int = 0,
    ) -> None:
        self._lowering, self._weights = lowering, arena
        self._unpacked = ArenaMatrices(lowering, arena, dtype, unpacking)
        self._most = torch.cuda.get_device_properties(arena.device).multi_processor_count
        kernels = product_kernels(lowering)
        self._kernels: Mapping[ProductKernel, Kernel] = {k: load(k, "kog_product", k.shared_bytes) for k in kernels}
        self._arrange = load(kernels[0], "kog_arrange", 0)
        self._stages = {s.name: s for s in layer_matrices(lowering.schedule) if takes(lowering, s)}
        table, at = group_tables(lowering, self._stages)
        self._row_scales = {
            (name, layer): biases.data_ptr() + row_scales_at(lowering, name, layer, rank) for name, layer in at
        }
        self._table = torch.from_numpy(table).to(arena.device)
        begin, row = self._table.data_ptr(), self._table.stride(0) * self._table.element_size()
        self._groups = {where: [begin + row * n for n in rows] for where, rows in at.items()}
        self._ready: dict[tuple[str, int], Ready] = {}
        most_bytes = max(k.partial_bytes for k in kernels)
        self._partials = torch.empty(self._most * most_bytes // 4, device=arena.device)
        self._arrived = torch.zeros(self._most, dtype=torch.int32, device=arena.device)

    def product(self, layer: int, stage: str, x: Tensor, bias: Tensor | None) -> Tensor:
        if stage not in self._stages:
            return self._unpacked.product(layer, stage, x, bias)
        x = x.contiguous()
        shards, tokens, _ = x.shape
        way = self._ready.get((stage, tokens)) or self._make_ready(stage, tokens)
        y = x.new_empty(shards, tokens, way.rows)
        arranged = x.new_empty(way.arranged)
        arrange, multiply = way.arrange_call, way.call
        arrange.out = multiply.x = arranged.data_ptr()
        arrange.x, multiply.y = x.data_ptr(), y.data_ptr()
        stream = torch.cuda.current_stream(x.device).cuda_stream
        multiply.row_scales = self._row_scales[stage, layer]
        for groups in self._groups[stage, layer]:
            multiply.groups = groups
            way.arrange(stream)
            way.multiply(stream)
            arrange.x += tokens * way.cols * x.element_size()
            multiply.y += tokens * way.rows * x.element_size()
            multiply.row_scales += 4 * way.rows
        return y if bias is None else y.add_(bias[:, None])

    def groups(self, stage: str, layer: int) -> int:
        """The address of a stage's groups in a layer, of its first shard."""
        return self._groups[stage, layer][0]

    @property
    def nbytes(self) -> int:
        held = (self._table, self._partials, self._arrived)
        return sum(t.nbytes for t in held) + self._unpacked.nbytes

    def _make_ready(self, name: str, tokens: int) -> "Ready":
        lo, stage = self._lowering, self._stages[name]
        weights = lo.weights[name]
        way = deal(stage.rows, lo.padded_k(stage), tokens, self._most, weights)
        padded = way.token_tiles * way.kernel.tokens
        parts, steps = lo.tilings[name].k_parts, lo.steps(stage)
        slab_shift, pack_shift = parts.bit_length() - 1, weights.pack.bit_length() - 1
        arrange = ArrangeCall(None, None, tokens, padded, stage.cols, slab_shift, steps, pack_shift)
        blocks = -(-padded * parts * steps // ARRANGE_THREADS)
        call = ProductCall(
            self._weights.data_ptr(),
            None,
            None,
            None,
            self._partials.data_ptr(),
            self._arrived.data_ptr(),
            None,
            tokens,
            padded,
            stage.rows,
            way.row_tiles,
            way.token_tiles,
            way.steps,
            way.whole,
            slab_shift,
            *ring_slot_steps(lo),
        )
        if len(self._ready) >= MOST_READY:
            self._ready.clear()
        ready = self._ready[name, tokens] = Ready(
            stage.rows,
            stage.cols,
            padded * lo.padded_k(stage),
            arrange,
            call,
            self._arrange.queued(blocks, ARRANGE_THREADS, arrange),
            self._kernels[way.kernel].queued(way.blocks, way.kernel.threads, call),
        )
        return ready


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
        groups = _groups(lowering, stages[name], unit_places(lowering, stages[name], layer, first))
        at[name, layer] = [count + shard * groups.shape[1] for shard in range(len(groups))]
        count += len(groups) * groups.shape[1]
        parts.append(groups.reshape(-1, 4))
    return np.concatenate(parts), at


def _groups(lowering: CudaLowering, stage: Stage, units: np.ndarray) -> np.ndarray:
    groups = group_places(lowering, stage, units)
    return np.pad(groups, ((0, 0), (0, -groups.shape[1] % MOST_GROUPS), (0, 0)), mode="edge")
