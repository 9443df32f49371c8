"""Products of prompts with the matrices of the weight arena (prompt.cu)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    unpacking  of a narrow model, whose matrices the kernels read out of its buffer
    """

    def __init__(
        self,
        lowering: CudaLowering,
        arena: Tensor,
        dtype: torch.dtype,
        load: Callable[[ProductKernel, str, int], Kernel],
        unpacking: Unpacking | None = None,
    ) -> None:
        self._lowering, self._unpacking = lowering, unpacking
        self._weights = arena if unpacking is None else unpacking.buffer
        self._unpacked = ArenaMatrices(lowering, arena, dtype, unpacking)
        self._most = torch.cuda.get_device_properties(arena.device).multi_processor_count
        self._kernels: Mapping[ProductKernel, Kernel] = {
            k: load(k, "kog_product", k.shared_bytes) for k in KERNELS
        }
        self._arrange = load(KERNELS[0], "kog_arrange", 0)
        self._stages = {s.name: s for s in layer_matrices(lowering.schedule) if takes(lowering, s)}
        make = group_tables if unpacking is None else unpacked_group_tables
        table, at = make(lowering, self._stages)
        self._table = torch.from_numpy(table).to(arena.device)
        begin, row = self._table.data_ptr(), self._table.stride(0) * self._table.element_size()
        self._groups = {where: [begin + row * n for n in rows] for where, rows in at.items()}
        self._ready: dict[tuple[str, int], Ready] = {}
        most_bytes = max(k.partial_bytes for k in KERNELS)
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
        if self._unpacking is not None:
            self._unpacking.queue(layer, stage, stream)
        for groups in self._groups[stage, layer]:
            multiply.groups = groups
            way.arrange(stream)
            way.multiply(stream)
            arrange.x += tokens * way.cols * x.element_size()
            multiply.y += tokens * way.rows * x.element_size()
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
        way = deal(stage.rows, lo.padded_k(stage), tokens, self._most)
        padded = way.token_tiles * way.kernel.tokens
        parts, steps = lo.tilings[name].k_parts, lo.steps(stage)
        arrange = ArrangeCall(None, None, tokens, padded, stage.cols, parts, steps)
        blocks = -(-padded * parts * steps // ARRANGE_THREADS)
        call = ProductCall(
            self._weights.data_ptr(),
            None,
            None,
            None,
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
            *((lo.fragments, lo.num_blocks * lo.fragments) if self._unpacking is None else (1, 1)),
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


def unpacked_group_tables(
    lowering: CudaLowering, stages: Mapping[str, Stage]
) -> tuple[np.ndarray, dict[tuple[str, int], list[int]]]:
    """As `group_tables`, where a stage's fragments lie in order (unpacking.py): alike in all layers."""
    parts = [np.zeros((0, 4), np.int32)]
    at: dict[tuple[str, int], list[int]] = {}
    count = 0
    for name, stage in stages.items():
        shape = (lowering.schedule.num_shards, lowering.num_units(stage))
        begin = np.arange(math.prod(shape)).reshape(shape) * lowering.steps(stage)
        groups = _groups(lowering, stage, np.stack([begin, np.zeros_like(begin)]))
        shards = [count + shard * groups.shape[1] for shard in range(len(groups))]
        at |= {(name, layer): shards for layer in range(lowering.schedule.spec.num_layers)}
        count += len(groups) * groups.shape[1]
        parts.append(groups.reshape(-1, 4))
    return np.concatenate(parts), at


def _groups(lowering: CudaLowering, stage: Stage, units: np.ndarray) -> np.ndarray:
    groups = group_places(lowering, stage, units)
    return np.pad(groups, ((0, 0), (0, -groups.shape[1] % MOST_GROUPS), (0, 0)), mode="edge")
