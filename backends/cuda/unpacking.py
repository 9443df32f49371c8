"""Narrow matrices that the kernels of products do not read, in 16 bits: one stage of a layer at a time (unpack.cu)."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from kog_triton.backends.cuda.layout.header import row_scales_at
from kog_triton.backends.cuda.layout.unpack import UnpackCall, unpacked_bytes, wide_fragment_bytes, wide_fragments
from kog_triton.schedule.cuda import WARPS, CudaLowering
from kog_triton.schedule.cuda_weights import StreamWeights
from kog_triton.schedule.packing import first_ring_slots, unit_places
from kog_triton.schedule.schedule import Stage

Tensor = torch.Tensor


class Queues(Protocol):
    """Of driver.Kernel."""

    def queued(self, blocks: int, threads: int, argument: ctypes.Structure) -> Callable[[int], None]: ...


class Unpacking:
    """Fills `buffer` with the matrices of one stage and layer after another, fragments of all warps in the order of
    shards, units and K.

    biases  the kernel's, with the scales of rows (memory.py)
    load    makes the kernel of weights that lie so ready
    stages  those whose matrices are unpacked
    rank    whose arena it is
    """

    def __init__(
        self,
        lowering: CudaLowering,
        arena: Tensor,
        biases: Tensor,
        load: Callable[[StreamWeights], Queues],
        stages: Sequence[Stage],
        rank: int = 0,
    ) -> None:
        self._lowering, self._biases, self._rank = lowering, biases, rank
        self.buffer = torch.empty(unpacked_bytes(lowering, stages), dtype=torch.uint8, device=arena.device)
        first, tables, at = first_ring_slots(lowering), [], 0
        begins: dict[tuple[str, int], int] = {}
        kernels: dict[StreamWeights, Queues] = {}
        self._stages: dict[str, tuple[UnpackCall, Callable[[int], None]]] = {}
        for stage in stages:
            weights = lowering.weights[stage.name]
            if weights not in kernels:
                kernels[weights] = load(weights)
            for layer in range(lowering.schedule.spec.num_layers):
                begins[stage.name, layer] = at
                tables.append(fragment_bytes_at(lowering, stage, layer, first[stage.name, layer]))
                at += len(tables[-1])
            call = UnpackCall(
                arena.data_ptr(),
                None,
                None,
                self.buffer.data_ptr(),
                lowering.unit_fragments(stage),
                lowering.num_units(stage),
                stage.rows,
                lowering.tilings[stage.name].k_parts,
            )
            blocks = wide_fragments(lowering, stage) // weights.pack
            queue = kernels[weights].queued(blocks, WARPS * 32, call)
            self._stages[stage.name] = call, queue
        self._fragments = torch.from_numpy(np.concatenate(tables)).to(arena.device)
        self._begins = {where: self._fragments[at:].data_ptr() for where, at in begins.items()}

    def run(self, layer: int, stage: str) -> Tensor:
        """The part of `buffer` that has a stage's matrices until the next run, behind what torch's current stream still
        does: uint8 [fragments of all warps * their bytes]."""
        call, launch = self._stages[stage]
        call.fragments = self._begins[stage, layer]
        row_scales = row_scales_at(self._lowering, stage, layer, self._rank)
        call.row_scales = self._biases.data_ptr() + row_scales
        device = self.buffer.device
        launch(torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
        found = self._lowering.schedule.stage(stage)
        return self.buffer[: wide_fragments(self._lowering, found) * wide_fragment_bytes(self._lowering)]

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes + self._fragments.nbytes


def fragment_bytes_at(lowering: CudaLowering, stage: Stage, layer: int, first: np.ndarray) -> np.ndarray:
    """The byte of the arena at which each fragment of all warps of a stage begins, in the order of shards, units and
    K, int64.

    first  the stage's, of `first_ring_slots`
    """
    begin, before = unit_places(lowering, stage, layer, first)[..., None]
    pack, each = lowering.weights[stage.name].pack, lowering.unit_fragments(stage)
    ahead, inside = np.divmod(before // pack + np.arange(each), lowering.fragments)
    slot = begin // lowering.fragments + ahead * lowering.num_blocks
    at: np.ndarray = slot * lowering.ring_slot_bytes + inside * lowering.fragment_bytes(stage)
    return at.reshape(-1)
