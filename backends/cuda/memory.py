"""What the monokernel reads and writes: the weight arena, tables, caches, words, and the struct of pointers.

Everything is a torch tensor on `device`; the mailbox is pinned host memory, which the GPU sees at the same
address. Packing runs where the weights are, for all blocks of a stage at once.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from kog_triton.backends.cuda.header import LAYER, Layout

from kog_triton.backends import WeightSource
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.packing import pack_blocks
from kog_triton.schedule.rope import rope_table
from kog_triton.schedule.schedule import Stage
from kog_triton.schedule.shards import canonical, shard_bias, shard_matrix

Tensor = torch.Tensor
Load = Callable[[str], Tensor]  # a canonical tensor by name, on the device
HALF = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}
MAILBOX_HEAD = (
    8  # 64-bit words before the tokens: [0] the host's word, [2] outcome, [3] tokens made
)
ERROR_WORDS = 8
REQUEST_WORDS = 64


TENSORS = (
    "weights",
    "embed",
    "gains",
    "biases",
    "qk_gains",
    "rope",
    "cache",
    "words",
    "logits",
    "tokens",
    "request",
    "mailbox",
    "error",
)


class Pointers(ctypes.Structure):
    """`kog::Pointers` (include/kog/block.h), member by member: TENSORS, then the limit of a wait."""

    _fields_ = (*((name, ctypes.c_void_p) for name in TENSORS), ("limit", ctypes.c_int64))


@dataclass
class Memory:
    """One model's tensors, by the names of `Pointers`; `cache` has one home a slot."""

    weights: Tensor  # uint8
    embed: Tensor
    gains: Tensor
    biases: Tensor
    qk_gains: Tensor
    rope: Tensor
    cache: Tensor  # [slots, layers, lanes, kv_heads, 2, positions, head_dim]
    words: Tensor
    logits: Tensor
    tokens: Tensor
    request: Tensor
    mailbox: Tensor  # int64, on the host
    error: Tensor

    def pointers(self, slot: int, limit: int, **others: Tensor) -> Pointers:
        """The kernel's argument for one slot; `others` stand in for tensors of the same name."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        tensors |= {"cache": self.cache[slot]} | others
        return Pointers(*(t.data_ptr() for t in tensors.values()), limit)


def allocate(layout: Layout, weights: WeightSource, num_slots: int, device: torch.device) -> Memory:
    lo = layout.lowering
    schedule, spec = lo.schedule, lo.schedule.spec
    dtype = HALF[spec.dtype]

    def get(name: str) -> Tensor:
        return weights.load(name).to(device)

    def padded(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, -t.shape[-1] % 4)).contiguous()

    embed = get("embed").to(dtype)
    gains = [
        get(f"layers.{i}.{name}").float()
        for i in range(spec.num_layers)
        for name in ("attention_norm", "mlp_norm")
    ]
    gains.append(get("norm").float())
    lane_kv = spec.num_kv_heads // schedule.num_shards
    shape = (spec.num_layers, schedule.num_shards, lane_kv, 2, layout.max_context, spec.head_dim)

    def ints(count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    table = torch.from_numpy(rope_table(spec.rope, spec.head_dim, layout.max_context))
    pinned = device.type == "cuda"
    mailbox = MAILBOX_HEAD + 2 * (layout.max_context + 1)
    return Memory(
        weights=pack_arena(lo, get, embed),
        embed=padded(embed),
        gains=padded(torch.stack(gains)),
        biases=_biases(lo, get, device),
        qk_gains=_qk_gains(lo, get, device),
        rope=table.to(device),
        cache=torch.zeros((num_slots, *shape), dtype=dtype, device=device),
        words=ints(layout.total_words),
        logits=torch.zeros(1, device=device),
        tokens=ints(layout.max_context + 1),
        request=ints(REQUEST_WORDS),
        mailbox=torch.zeros(mailbox, dtype=torch.int64, pin_memory=pinned),
        error=ints(ERROR_WORDS),
    )


def pack_arena(lo: CudaLowering, get: Load, embed: Tensor) -> Tensor:
    """The rank's weight arena, uint8: chunk i of all blocks side by side, each block's stream in order."""
    schedule, dtype = lo.schedule, embed.dtype
    chunk = lo.chunk_bytes // 2
    arena = embed.new_zeros((lo.stream_chunks(), lo.num_blocks, chunk), dtype=torch.int16)
    cursors = np.zeros(lo.num_blocks, np.int64)
    for segment in schedule.segments:
        for layer in range(segment.repeat):
            for stage in segment.stages:
                if stage.name not in lo.tilings:
                    continue
                w = _matrix(lo, stage, layer, get, embed).to(dtype).view(torch.int16)
                _place(arena, cursors, lo, stage, layer, w)
    return arena.view(-1).view(torch.uint8)


def _matrix(lo: CudaLowering, stage: Stage, layer: int, get: Load, embed: Tensor) -> Tensor:
    """A stage's weights [shards, rows, cols] (of the head, one matrix), gate above up."""
    parts = []
    for name in stage.weights:
        tensor = embed if name == "embed" else get(canonical(stage, name, layer)).to(embed.dtype)
        parts.append(shard_matrix(lo.schedule, stage, tensor))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _place(
    arena: Tensor, cursors: np.ndarray, lo: CudaLowering, stage: Stage, layer: int, w: Tensor
) -> None:
    """Pack one stage for all blocks and write it where each block's stream has got to."""
    by_kind: dict[tuple[int, int], list[int]] = {}
    for block in range(lo.num_blocks):
        units = len(lo.block_units(stage, layer, lo.place(stage, block)))
        by_kind.setdefault((lo.shard(stage, block, 0), units), []).append(block)
    for (shard, units), blocks in by_kind.items():
        if not units:
            continue
        packed = pack_blocks(lo, stage, layer, blocks, 0, w[shard])
        chunks = packed.shape[1]
        at = cursors[blocks][:, None] + np.arange(chunks)
        index = (
            torch.from_numpy(at).to(arena.device),
            torch.tensor(blocks, device=arena.device)[:, None],
        )
        arena[index] = packed.reshape(len(blocks), chunks, -1)
        cursors[blocks] += chunks


def _biases(lo: CudaLowering, get: Load, device: torch.device) -> Tensor:
    """float32 [layers, rows]: stage by stage, lane by lane, in the order in which rows are dealt out."""
    schedule = lo.schedule
    parts: list[Tensor] = []
    for layer in range(schedule.spec.num_layers):
        for name in LAYER:
            stage = schedule.stage(name)
            if not stage.biases:
                parts.append(torch.zeros(schedule.num_shards * stage.rows, device=device))
                continue
            tensors = [
                shard_bias(schedule, stage, get(canonical(stage, b, layer))) for b in stage.biases
            ]
            rows = torch.cat(tensors, 1).float()
            if name == "gate_up_proj":  # gate and up of one output side by side
                rows = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
            parts.append(rows.reshape(-1))
    return torch.cat(parts)


def _qk_gains(lo: CudaLowering, get: Load, device: torch.device) -> Tensor:
    spec = lo.schedule.spec
    if not spec.qk_norm:
        return torch.zeros(1, device=device)
    layers = [
        torch.stack([get(f"layers.{i}.{n}_norm").float() for n in "qk"])
        for i in range(spec.num_layers)
    ]
    return torch.stack(layers).contiguous()
