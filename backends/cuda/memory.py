"""What the monokernel reads and writes: the weight arena, tables, caches, words, and the struct of pointers.

Everything is a torch tensor on `device`; mailbox and outbox are pinned host memory, which the GPU sees at
the same address. What a request needs has one row a slot and outlives a launch. Packing runs where the
weights are, for all blocks of a stage at once.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kog_triton.backends import WeightSource
from kog_triton.backends.cuda.compilers import Background
from kog_triton.backends.cuda.layout import protocol
from kog_triton.backends.cuda.layout.header import gain_scale
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.names import POINTS, stamp_words
from kog_triton.backends.cuda.narrow_weights import narrow_matrices, scales_of_rows
from kog_triton.backends.embedding import narrow_table
from kog_triton.backends.logprob_words import RECORD_WORDS
from kog_triton.backends.memory_plan import MemoryPlan
from kog_triton.backends.narrow import LoadNarrow, load_narrow
from kog_triton.backends.prefill.library import rope_positions
from kog_triton.backends.prefill.upload import upload
from kog_triton.backends.request_words import OFFSETS, Flag, capacity
from kog_triton.backends.weight_upload import WeightUpload
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import WARPS, CudaLowering
from kog_triton.schedule.embedding import embedding_row
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.narrow_packing import NarrowMatrix, pack_narrow
from kog_triton.schedule.packing import first_ring_slots, pack_blocks
from kog_triton.schedule.rope import rope_table
from kog_triton.schedule.schedule import Epilogue, Scope, Stage
from kog_triton.schedule.shards import canonical, shard_bias, shard_matrix, shard_row_scales

Tensor = torch.Tensor
Load = Callable[[str], Tensor]  # a canonical tensor by name, on the device
HALF = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}
# Bytes of the arena that are packed at once, which take up to five times as many for a moment: beside the weights of
# Llama-3.3-70B a GPU of 140 GiB has 8 left, and its head is 2.
PACKED_AT_ONCE = 1 << 28
ERROR_WORDS = 9  # what expired, and whether another rank's wait has (include/kog/ranks.h)

BY_SLOT = ("cache", "streams", "tokens", "request", "states", "outbox")


@dataclass
class Memory:
    """One model's tensors, by the names and shapes of TENSORS (protocol.py); those of BY_SLOT have a row a slot.

    Mapped ones are int64 on the host; `counts` and `scores` are the kernel's own.
    """

    weights: Tensor
    embed: Tensor  # a narrow one's bytes, viewed as 16-bit values
    gains: Tensor
    biases: Tensor
    qk_gains: Tensor
    rope: Tensor
    cache: Tensor
    streams: Tensor
    words: Tensor
    logits: Tensor
    tokens: Tensor
    request: Tensor
    counts: Tensor
    scores: Tensor
    masks: Tensor
    logprobs: Tensor
    states: Tensor
    mailbox: Tensor
    outbox: Tensor
    error: Tensor
    profile: Tensor
    clocks: Tensor

    def pointers(self, slots: Sequence[int], limit: int, most_steps: int, **others: Tensor) -> protocol.Pointers:
        """The kernel's argument for a launch that serves `slots` round robin, for `most_steps` at most.

        `others` stand in for tensors of the same name.
        """
        tensors = {name: getattr(self, name) for name in protocol.TENSORS} | others
        for name, tensor in tensors.items():
            held, seen = tensor.element_size(), protocol.item_bytes(name)
            assert held == seen, f"{name}: {held} bytes an element, the kernel sees {seen}"
        order = (ctypes.c_int32 * protocol.MAX_REQUESTS)(*slots)
        addresses = (t.data_ptr() for t in tensors.values())
        positions = self.tokens.shape[1] - 1
        plane = math.prod(self.cache.shape[-2:])
        return protocol.Pointers(*addresses, limit, most_steps, positions, plane, len(slots), order)

    def write_request(self, slot: int, words: np.ndarray, prompt: Sequence[int], start: int) -> None:
        """Lay a request into a slot, to be computed from position `start` on, in the stream's order.

        words uint32, from `request_words.encode`.
        """
        self.clear_told(slot, words)
        for rows, values in self.pieces_of(words, prompt, start):
            upload(torch.from_numpy(values), rows[slot, : values.size])

    def pieces_of(self, words: np.ndarray, prompt: Sequence[int], start: int) -> list[tuple[Tensor, np.ndarray]]:
        """What a kernel reads of a request: int32 values, and the tensor whose row of the slot begins with them."""
        return [
            (self.request, words.view(np.int32)),
            (self.tokens, np.array(prompt, np.int32)),
            (self.states, np.array([start, prompt[start]], np.int32)),
        ]

    def clear_told(self, slot: int, words: np.ndarray) -> None:
        """What host and kernel write for each other, empty; at once, for nothing of the slot runs any more.

        By numpy: an operation of torch's lets go of Python's lock, and gets it back late where others want it.
        """
        flags, most = int(words[OFFSETS["flags"]]), int(words[OFFSETS["most"]])
        if flags & Flag.MASKED:
            self.masks.numpy()[slot] = 0
        if flags & Flag.LOGPROBS:
            self.logprobs.numpy()[slot, :most] = 0
        self.outbox.numpy()[slot, : most + 1] = 0  # of a long context all of it takes 0.2 ms

    def recount(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """What `counts` of a slot hold before the step of the last token of `output` (include/kog/edit.h): a step
        that did not end may have counted it."""
        vocab = self.counts.shape[1]
        seen = np.minimum(np.bincount(prompt, minlength=vocab), 1)
        made = np.bincount(np.array(output[:-1], np.int64), minlength=vocab)
        counts = np.where(made > 0, made + 1, seen).astype(np.int32)
        upload(torch.from_numpy(counts), self.counts[slot])

    def apart(self) -> "Memory":
        """This model with one slot of its own, a mailbox and words: it leaves all slots alone."""
        rows = {name: _zeros_like(getattr(self, name)[:1]) for name in BY_SLOT}
        return replace(self, **rows, mailbox=_zeros_like(self.mailbox))


def _zeros_like(t: Tensor) -> Tensor:
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device, pin_memory=t.is_pinned())


def plan_of(layout: Layout, num_slots: int, rank: int = 0) -> MemoryPlan:
    """What `allocate` will take of a rank's GPU, but for words and tables."""
    lo = layout.lowering
    spec = lo.schedule.spec
    arena = lo.stream_ring_slots(rank) * lo.num_blocks * lo.ring_slot_bytes
    row = embedding_row(spec)
    embed = spec.vocab_size * (row.bytes if row else (spec.hidden_size + -spec.hidden_size % 4) * 2)
    position = math.prod(layout.cache_shape) * 2 // layout.max_context
    return MemoryPlan(arena + embed, position, num_slots, layout.max_context)


def allocate(layout: Layout, weights: WeightSource, num_slots: int, device: torch.device, rank: int = 0) -> Memory:
    lo = layout.lowering
    spec = lo.schedule.spec
    dtype = HALF[spec.dtype]

    def padded(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t, (0, -t.shape[-1] % 4)).contiguous()

    # Beside the weights: of a context of 131,072 it takes a thread the better part of a second.
    rope = Background(1).submit(rope_table, spec.rope, spec.head_dim, rope_positions(layout.max_context))
    with WeightUpload(device) as bring:

        def get(name: str) -> Tensor:
            return bring(weights.load(name))

        get_narrow = partial(load_narrow, weights, bring)
        if embedding_row(spec):
            table = narrow_table(get_narrow("embed"), spec).view(dtype)
            embed = torch.empty(0, dtype=dtype, device=device)  # a head that is tied is narrow, too
        else:
            embed = get("embed").to(dtype)
            table = padded(embed)
        gains = [
            get(f"layers.{i}.{name}").float() for i in range(spec.num_layers) for name in ("attention_norm", "mlp_norm")
        ]
        gains.append(get("norm").float())
        gains = [gain * scale for gain, scale in zip(gains, _gain_scales(lo), strict=True)]
        arena = pack_arena(lo, get, embed, rank, get_narrow)
        biases = _biases(lo, get, get_narrow, device, rank)
        qk_gains = _qk_gains(lo, get, device)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    pinned = device.type == "cuda"

    def mapped(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, pin_memory=pinned)

    positions = layout.max_context + 1
    return Memory(
        weights=arena,
        embed=table,
        gains=padded(torch.stack(gains)),
        biases=biases,
        qk_gains=qk_gains,
        rope=torch.from_numpy(rope.result()).to(device),
        cache=torch.zeros((num_slots, *layout.cache_shape), dtype=dtype, device=device),
        streams=torch.zeros(num_slots, lo.schedule.num_shards, spec.hidden_size + -spec.hidden_size % 4, device=device),
        words=ints(layout.total_words),
        logits=torch.zeros(1, device=device),
        tokens=ints(num_slots, positions),
        request=ints(num_slots, capacity(spec.vocab_size)),
        counts=ints(num_slots, spec.vocab_size),
        scores=torch.zeros((1 + layout.columns, spec.vocab_size), device=device),
        masks=mapped(num_slots, -(-spec.vocab_size // 32)),
        logprobs=mapped(num_slots, positions, RECORD_WORDS),
        states=ints(num_slots, 2),
        mailbox=mapped(protocol.MAILBOX_WORDS),
        outbox=mapped(num_slots, positions, 2),
        error=ints(ERROR_WORDS),
        **stamp_tensors(layout, device),
    )


def stamp_tensors(layout: Layout, device: torch.device) -> dict[str, Tensor]:
    """`profile` and `clocks`, zero: empty unless the layout keeps stamps."""
    lo, tokens = layout.lowering, layout.profile_tokens
    layers, words = lo.schedule.spec.num_layers, stamp_words(lo.schedule.num_ranks)
    shapes = {
        "profile": (tokens, lo.num_blocks, WARPS, layers + 1, len(POINTS), words),
        "clocks": (tokens + 1 if tokens else 0, lo.num_blocks, 2),
    }
    return {n: torch.zeros(s, dtype=torch.int64, device=device) for n, s in shapes.items()}


def pack_arena(
    lo: CudaLowering, get: Load, embed: Tensor, rank: int = 0, get_narrow: LoadNarrow | None = None
) -> Tensor:
    """A rank's weight arena, uint8: ring slot i of all blocks side by side, each block's stream in order.

    get_narrow  gives weights that are stored narrow; not asked for others
    """
    schedule, dtype = lo.schedule, embed.dtype
    values = lo.ring_slot_bytes // 2
    arena = embed.new_zeros((lo.stream_ring_slots(rank), lo.num_blocks, values), dtype=torch.int16)
    first = first_ring_slots(lo, rank)
    for segment in schedule.segments:
        for layer in range(segment.repeat):
            for stage in segment.stages:
                if stage.name not in lo.tilings:
                    continue
                w: list[Any]
                if lo.weights[stage.name].format:
                    assert get_narrow is not None
                    w = narrow_matrices(lo, stage, layer, get_narrow)
                    if stage.scope is Scope.ALL:
                        w = [w[0].of_rows(*schedule.head_rows(rank))]
                    pack = partial(_pack_narrow, lo, stage, layer, rank)
                else:
                    wide = _matrix(lo, stage, layer, get, embed).to(dtype).view(torch.int16)
                    if stage.scope is Scope.ALL:  # the head: the rank's part of the vocabulary
                        wide = wide[:, slice(*schedule.head_rows(rank))]
                    w, pack = [*wide], partial(_pack_wide, lo, stage, layer, rank)
                _place(arena, first[stage.name, layer], lo, stage, layer, rank, w, pack)
    return arena.view(-1).view(torch.uint8)


def _pack_wide(lo: CudaLowering, stage: Stage, layer: int, rank: int, blocks: list[int], w: Tensor) -> Tensor:
    packed: Tensor = pack_blocks(lo, stage, layer, blocks, rank, w)
    return packed.reshape(*packed.shape[:2], -1)


def _pack_narrow(lo: CudaLowering, stage: Stage, layer: int, rank: int, blocks: list[int], w: NarrowMatrix) -> Tensor:
    packed: Tensor = pack_narrow(lo, stage, layer, blocks, rank, w)
    return packed.view(torch.int16)


def _matrix(lo: CudaLowering, stage: Stage, layer: int, get: Load, embed: Tensor) -> Tensor:
    """A stage's weights [shards, rows, cols] (of the head, one matrix), gate above up."""
    parts = []
    for name in stage.weights:
        tensor = embed if name == "embed" else get(canonical(stage, name, layer)).to(embed.dtype)
        parts.append(shard_matrix(lo.schedule, stage, tensor))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def _place(
    arena: Tensor,
    first: np.ndarray,
    lo: CudaLowering,
    stage: Stage,
    layer: int,
    rank: int,
    w: list[Any],
    pack: Callable[[list[int], Any], Tensor],
) -> None:
    """Pack one stage for all blocks of a rank and write it to the chunks of each block's stream from `first` on.

    w  a matrix a shard, as `pack` takes it: ring slots of some blocks, [blocks, slots, 16-bit words of a slot].
    """
    by_kind: dict[tuple[int, int], list[int]] = {}
    own = lo.group_index(stage, np.arange(lo.num_blocks))
    begin, end = lo.unit_bounds(stage, layer, own, rank)
    for block, units in enumerate((end - begin).tolist()):
        by_kind.setdefault((lo.shard(stage, block, rank), units), []).append(block)
    for (shard, units), alike in by_kind.items():
        if not units:
            continue
        slots = lo.stage_ring_slots(stage, layer, lo.group_index(stage, alike[0]), rank)
        most = max(1, PACKED_AT_ONCE // (slots * lo.ring_slot_bytes))
        for some in range(0, len(alike), most):
            blocks = alike[some : some + most]
            packed = pack(blocks, w[shard])
            at = first[blocks][:, None] + np.arange(packed.shape[1])
            index = (torch.from_numpy(at).to(arena.device), torch.tensor(blocks, device=arena.device)[:, None])
            arena[..., : packed.shape[2]][index] = packed


def _biases(lo: CudaLowering, get: Load, get_narrow: LoadNarrow, device: torch.device, rank: int) -> Tensor:
    """float32 [layers, rows], then of the head those that the rank scores: of every stage its biases, then what
    multiplies its sums (`row_scales`), shard by shard, in the order in which rows are dealt out."""
    schedule = lo.schedule
    parts: list[Tensor] = []

    def row_scales(stage: Stage, layer: int) -> list[Tensor]:
        if not lo.weights[stage.name].row_scales:
            return []
        narrow = [get_narrow(canonical(stage, w, layer)) for w in stage.weights]
        scales = [scales_of_rows(n)[..., 0] for n in narrow]
        if stage.scope is Scope.ALL:
            return [scales[0][0, slice(*schedule.head_rows(rank))]]
        return [_dealt(stage, torch.cat([shard_row_scales(schedule, stage, s) for s in scales], 1))]

    for layer in range(schedule.spec.num_layers):
        for stage in layer_matrices(schedule):
            if not stage.biases:
                parts.append(torch.zeros(schedule.num_shards * stage.rows, device=device))
            else:
                tensors = [shard_bias(schedule, stage, get(canonical(stage, b, layer))) for b in stage.biases]
                parts.append(_dealt(stage, torch.cat(tensors, 1)))
            parts += row_scales(stage, layer)
    return torch.cat([*parts, *row_scales(schedule.stage("lm_head"), 0)])


def _dealt(stage: Stage, rows: Tensor) -> Tensor:
    """A value a row, [lanes, rows], in the order in which rows are dealt out: gate and up of one output together."""
    rows = rows.float()
    if stage.epilogue is Epilogue.SILU_MUL:
        rows = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
    return rows.reshape(-1)


def _gain_scales(lo: CudaLowering) -> list[float]:
    """What the gains of each norm are multiplied with, two a layer and the last: what narrow stages need."""
    names = ["qkv_proj", "gate_up_proj"] * lo.schedule.spec.num_layers + ["lm_head"]
    return [gain_scale(lo, lo.schedule.stage(name)) for name in names]


def _qk_gains(lo: CudaLowering, get: Load, device: torch.device) -> Tensor:
    spec = lo.schedule.spec
    if not spec.qk_norm:
        return torch.zeros(1, device=device)
    layers = [torch.stack([get(f"layers.{i}.{n}_norm").float() for n in "qk"]) for i in range(spec.num_layers)]
    return torch.stack(layers).contiguous()
