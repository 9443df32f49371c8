"""What the megakernel reads and writes: weights packed in tiles, tables, caches and words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kog_triton.backends import WeightSource
from kog_triton.backends.embedding import narrow_table
from kog_triton.backends.memory_plan import MemoryPlan
from kog_triton.backends.narrow import LoadNarrow, load_narrow
from kog_triton.backends.prefill.library import rope_positions
from kog_triton.backends.request_words import capacity
from kog_triton.backends.triton.host.narrow_tiles import pack_narrow_tiles
from kog_triton.backends.triton.kernel.columns import scratch_sizes
from kog_triton.backends.triton.kernel.pointers import Pointers
from kog_triton.backends.triton.kernel.slots import STATE_WORDS, mailbox_offsets
from kog_triton.backends.triton.kernel.words import RECORD
from kog_triton.backends.weight_upload import WeightUpload
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.rope import rope_table
from kog_triton.schedule.schedule import Epilogue, Schedule, Scope, Stage
from kog_triton.schedule.shards import canonical, shard_bias, shard_matrix
from kog_triton.schedule.triton import StageTiles, Tiles
from kog_triton.schedule.triton_packing import pack_tiles

Tensor = torch.Tensor
Get = Callable[[str], Tensor]  # a canonical weight, on the device
HALF = {False: torch.bfloat16, True: torch.float16}
PATIENCE = 1 << 22  # of a wait, in units of 1,024 ns: 4 seconds


@dataclass
class Memory:
    """Everything a launch points to."""

    pointers: Pointers
    weight_bytes: int
    blank_words: Tensor  # zeros: what `pointers.words` and `error` hold before a launch
    blank_error: Tensor


def plan_of(schedule: Schedule, tiles: Tiles, num_slots: int, columns: int = 1) -> MemoryPlan:
    """What `allocate` will take of the GPU, but for tables."""
    spec = schedule.spec
    weights = 4 * arena_words(schedule, tiles)
    weights += spec.vocab_size * (tiles.embedding.bytes if tiles.embedding else 2 * spec.hidden_size)
    position = 2 * tiles.num_layers * tiles.lanes * tiles.kv_heads * 2 * tiles.head_dim
    words = 2 * 4 * columns * tiles.total_words  # and zeros to begin with
    return MemoryPlan(weights, position, num_slots, tiles.max_context, words)


def allocate(
    schedule: Schedule, tiles: Tiles, weights: WeightSource, num_slots: int, device: torch.device, columns: int = 1
) -> Memory:
    """`columns`: requests that share a step at most."""
    spec, dtype = schedule.spec, HALF[tiles.f16]

    with WeightUpload(device) as bring:

        def get(name: str) -> Tensor:
            return bring(weights.load(name))

        narrow = partial(load_narrow, weights, bring)
        if tiles.embedding:  # a head that is tied is narrow, too
            embed = narrow_table(narrow("embed"), spec).view(dtype)
        else:
            embed = get("embed").to(dtype).contiguous()
        arena = _pack(schedule, tiles, get, narrow, embed, dtype, device)
        gains = [
            _planes(get(f"layers.{i}.{name}"))
            for i in range(spec.num_layers)
            for name in ("attention_norm", "mlp_norm")
        ]
        gains.append(_planes(get("norm")))
        biases, qk_gains = _biases(schedule, get, device), _qk_gains(spec, get, device)
    table = rope_table(spec.rope, spec.head_dim, rope_positions(tiles.max_context))

    def ints(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    words = ints(columns * tiles.total_words)
    floats, halves = scratch_sizes(tiles)
    vocab = spec.vocab_size
    pointers = Pointers(
        weights=arena,
        half_weights=arena.view(dtype),
        embed=embed.view(torch.int32),
        half_embed=embed,
        gains=torch.stack(gains).contiguous(),
        biases=biases,
        qk_gains=qk_gains,
        rope=torch.from_numpy(table).to(device),
        windows=torch.tensor(spec.windows, dtype=torch.int32, device=device),
        reduces=torch.tensor([list(spec.reduce_attention), list(spec.reduce_mlp)], dtype=torch.int32, device=device),
        words=words,
        wide=words.view(torch.int64),
        fences=ints(tiles.num_blocks * 32),
        error=ints(1 + tiles.num_blocks, RECORD.value),
        chunk=torch.zeros(floats, device=device),
        half_chunk=torch.zeros(halves, dtype=dtype, device=device),
        profile=torch.zeros(max(1, tiles.profile * tiles.num_blocks * 16), dtype=torch.int64, device=device),
        slot_order=ints(1 + num_slots),
        requests=ints(num_slots, capacity(vocab)),
        states=ints(num_slots, tiles.num_blocks, STATE_WORDS.value),
        tokens=ints(num_slots, tiles.max_context + 1),
        marks=ints(num_slots, vocab),
        bias=torch.zeros(num_slots, vocab, device=device),
        bans=ints(num_slots, vocab),
        kv=new_cache(tiles, num_slots, device),
        logits=torch.zeros(columns, vocab, device=device),
        mailbox=new_mailbox(tiles, num_slots, device),
        limit=PATIENCE,
    )
    weight_bytes = arena.nbytes + embed.nbytes
    return Memory(pointers, weight_bytes, torch.zeros_like(words), torch.zeros_like(pointers.error))


def new_cache(tiles: Tiles, num_slots: int, device: torch.device) -> Tensor:
    """Keys and values: [slots, layers, lanes, kv_heads, 2, positions, head_dim]."""
    shape = (tiles.num_layers, tiles.lanes, tiles.kv_heads, 2, tiles.max_context, tiles.head_dim)
    return torch.zeros(num_slots, *shape, dtype=HALF[tiles.f16], device=device)


def new_mailbox(tiles: Tiles, num_slots: int, device: torch.device) -> Tensor:
    """int64 [slots, words] in the host's memory, mapped: slots.py says what the words are."""
    size = mailbox_offsets(tiles)["end"]
    return torch.zeros(num_slots, size, dtype=torch.int64, pin_memory=device.type == "cuda")


def _pack(
    schedule: Schedule,
    tiles: Tiles,
    get: Get,
    narrow: LoadNarrow,
    embed: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The weight arena, int32: every layer's stages in order, then the head."""
    head, lm_head = tiles.stages[4], schedule.stage("lm_head")
    arena = torch.empty(arena_words(schedule, tiles), dtype=torch.int32, device=device)

    def codes(stage: Stage, tiling: StageTiles, names: Sequence[str]) -> Tensor:
        parts = [narrow(name) for name in names]
        return pack_narrow_tiles(stage, tiling, tiles.sizes.warps, tiles.group, parts)

    for layer in range(tiles.num_layers):
        base = layer * tiles.layer_words
        for tiling, stage in zip(tiles.stages, layer_matrices(schedule), strict=False):
            if tiling.is_narrow:
                names = [canonical(stage, w, layer) for w in stage.weights]
                _place(arena, base + tiling.offset, codes(stage, tiling, names))
                continue
            parts = [shard_matrix(schedule, stage, get(canonical(stage, w, layer)).to(dtype)) for w in stage.weights]
            packed = pack_tiles(stage, tiling, tiles.group, torch.cat(parts, 1).view(torch.int16))
            _place(arena, base + tiling.offset, packed)
    (name,) = lm_head.weights
    at = tiles.num_layers * tiles.layer_words
    if head.is_narrow:  # of a plain model
        _place(arena, at, codes(lm_head, head, lm_head.weights))
        return arena
    matrix = embed if name == "embed" else get(name).to(dtype)
    matrix = shard_matrix(schedule, lm_head, matrix).view(torch.int16)
    group = tiles.num_blocks if lm_head.scope is Scope.ALL else tiles.group
    for part in matrix.split(head.cols, 2):
        _place(arena, at, pack_tiles(lm_head, head, group, part))
        at += tiles.head_words
    return arena


def arena_words(schedule: Schedule, tiles: Tiles) -> int:
    """Of all layers' matrices, the head's, and what is read behind a small head."""
    parts = schedule.stage("lm_head").cols // tiles.stages[4].cols  # lanes, of a concatenated head
    before = tiles.layer_words * tiles.num_layers + (parts - 1) * tiles.head_words
    return before + max(tiles.head_words, tiles.asked_at_head)


def _place(arena: Tensor, at: int, packed: Tensor) -> None:
    flat = packed.reshape(-1).view(torch.int32)
    arena[at : at + len(flat)] = flat


def _planes(gain: Tensor) -> Tensor:
    """[lanes or 1, hidden] as [lanes or 1, 2, hidden / 2]: even elements, then odd ones."""
    gain = gain.float()
    return torch.stack([gain[:, 0::2], gain[:, 1::2]], 1)


def _biases(schedule: Schedule, get: Get, device: torch.device) -> Tensor:
    """A layer's bias rows, stage after stage, every lane's; zeros where a stage has none."""
    parts: list[Tensor] = []
    for layer in range(schedule.spec.num_layers):
        for stage in layer_matrices(schedule):
            if stage.biases:
                rows = torch.cat(
                    [shard_bias(schedule, stage, get(canonical(stage, b, layer))) for b in stage.biases], 1
                ).float()
                if stage.epilogue is Epilogue.SILU_MUL:  # woven like the rows
                    rows = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
            else:
                rows = torch.zeros(schedule.num_shards, stage.rows, device=device)
            parts.append(rows.reshape(-1))
    return torch.cat(parts)


def _qk_gains(spec: ModelSpec, get: Get, device: torch.device) -> Tensor:
    if not spec.qk_norm:
        return torch.zeros(1, device=device)
    return torch.stack(
        [torch.stack([get(f"layers.{i}.{n}_norm") for n in "qk"]).float() for i in range(spec.num_layers)]
    )
