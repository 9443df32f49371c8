"""A numpy machine that decodes from packed streams alone: it proves a lowering before a kernel exists.

Every block has a cursor into its own stream and takes ring slots strictly in order; values pass between blocks
only as wire words, whose phase bit is checked at every read; warps hold their own part of K, partial sums
are added in warp order; the residual stream is each block's own copy, as in the kernel. Blocks run stage by
stage, one after another: this proves layout and arithmetic, not the order of memory operations.

Nothing here is taken from the packing: fragments are read by the rule that cuda.py states.
"""

import numpy as np

from kog_triton.model.spec import DType, Head, ModelSpec, Reduce
from kog_triton.schedule import wire
from kog_triton.schedule.cuda import WARPS, CudaLowering
from kog_triton.schedule.lowering import PADDING
from kog_triton.schedule.schedule import Stage
from tests.lib.narrow_stream import matrices_of, narrow_fragments


class Stream:
    """One block's weights: ring slots in order, each taken once."""

    def __init__(self, arena: np.ndarray, lowering: CudaLowering, rank: int, block: int):
        self.arena, self.dtype = arena, lowering.schedule.spec.dtype
        self.bytes = lowering.ring_slot_bytes
        count = lowering.block_ring_slots(block, rank)
        self.addresses = [(i * lowering.num_blocks + block) * self.bytes for i in range(count)]
        self.at = 0

    def take(self) -> np.ndarray:
        address = self.addresses[self.at]
        self.at += 1
        return self.arena[address : address + self.bytes]

    def rewind(self) -> None:
        assert self.at == len(self.addresses), "the step did not consume its stream exactly"
        self.at = 0


class Buffers:
    """The rotating word buffers of one stage's outputs, for every shard; pairs of them a word, or one."""

    def __init__(self, name: str, width: int, pair: bool, count: int, shards: int, dtype: DType, exact: bool):
        self.name, self.width, self.count, self.dtype = name, width, count, dtype
        self.pair = pair and dtype is not DType.F32 and not exact
        words = width // 2 if self.pair else width
        self.words = np.zeros((count, shards, words), np.uint32)
        self.exact = np.zeros((count, shards, width)) if exact else None

    def _phase(self, iteration: int) -> int:
        return (iteration // self.count + 1) & 1

    def publish(self, iteration: int, shard: int, first: int, values: np.ndarray) -> None:
        slot, phase = iteration % self.count, self._phase(iteration)
        if self.exact is not None:
            self.exact[slot, shard, first : first + len(values)] = values
        if self.pair:
            assert first % 2 == 0 and len(values) % 2 == 0, "a block publishes whole words"
            word = wire.pack_pair(values, phase, self.dtype)
            self.words[slot, shard, first // 2 : first // 2 + len(word)] = word
        else:
            self.words[slot, shard, first : first + len(values)] = wire.pack_f32(values, phase)

    def read(self, iteration: int, shard: int, first: int, last: int) -> np.ndarray:
        slot = iteration % self.count
        run = slice(first // 2, -(-last // 2)) if self.pair else slice(first, last)
        words = self.words[slot, shard, run]
        ready = wire.phases(words) == self._phase(iteration)
        assert ready.all(), f"{self.name}: word {int(np.argmin(ready))} of {first} is stale"
        if self.exact is not None:
            return self.exact[slot, shard, first:last].copy()
        if self.pair:
            values = wire.unpack_pair(words, self.dtype).astype(np.float64)
            return values[first % 2 : first % 2 + last - first]
        return wire.unpack_f32(words).astype(np.float64)


class RingWalker:
    """Decodes one token a step. `exact` keeps activations unrounded, so that only layout is judged."""

    def __init__(self, lowering: CudaLowering, arenas, gains, biases, embed, rope, exact=True, row_scales=None):
        self.row_scales = row_scales or {}  # of stages whose rows have one scale each
        self.lo, self.s, self.spec = lowering, lowering.schedule, lowering.schedule.spec
        self.gains, self.biases, self.embed, self.rope, self.exact = (gains, biases, embed, rope, exact)
        self.streams = {
            (rank, block): Stream(arenas[rank], lowering, rank, block)
            for rank in range(self.s.num_ranks)
            for block in range(lowering.num_blocks)
        }
        self.buffers = {}
        for stage in (self.s.stage(n) for n in ("qkv_proj", "attention", "gate_up_proj")):
            self._add(stage.target, stage.outputs, pair=True)
        for name in ("attention_out", "mlp_out"):
            self._add(name, self.spec.hidden_size)
            if Reduce.DELAYED in self.spec.reduce_attention + self.spec.reduce_mlp:
                self._add(name + "_delayed", self.spec.hidden_size, count=3 * self.spec.delay)
        shape = (self.spec.num_layers, self.s.num_shards)
        self.kv = [[[] for _ in range(shape[1])] for _ in range(shape[0])]
        self.layers_done = 0  # counts over tokens: the iteration of every layer exchange
        self.tokens_done = 0

    def _add(self, name: str, width: int, pair: bool = False, count: int = 1) -> None:
        shards, dtype = self.s.num_shards, self.spec.dtype
        self.buffers[name] = Buffers(name, width, pair, count, shards, dtype, self.exact)

    # ---- one token ----

    def step(self, token: int, position: int) -> tuple[np.ndarray, list[dict]]:
        """Logits [vocab], and the logical tensors of every layer."""
        spec, s = self.spec, self.s
        x = {key: self.embed[token].astype(np.float64).copy() for key in self.streams}
        trace = []
        for layer in range(spec.num_layers):
            it = self.layers_done
            seen = {}
            for name, source, target in (
                ("qkv_proj", "x", "qkv"),
                ("o_proj", "attention", "attention_out"),
                ("gate_up_proj", "x", "mlp"),
                ("down_proj", "mlp", "mlp_out"),
            ):
                if name == "o_proj":
                    self._attention(layer, it, position)
                stage = s.stage(name)
                delayed = self._delayed(stage, layer, it)
                for key in self.streams:
                    self._matvec_block(stage, layer, it, key, x[key], source, target, delayed)
                if target.endswith("_out"):
                    for key in self.streams:
                        self._join(stage, layer, it, key, x)
                    seen[f"x_after_{name}"] = self._streams_of(x)
            for name in ("qkv", "attention", "mlp"):
                buffer = self.buffers[name]
                seen[name] = np.stack([buffer.read(it, i, 0, buffer.width) for i in range(s.num_shards)])
            trace.append(seen)
            self.layers_done += 1
        logits = self._head(x)
        for stream in self.streams.values():
            stream.rewind()
        self.tokens_done += 1
        return logits, trace

    # ---- stages ----

    def _matvec_block(self, stage: Stage, layer, it, key, x, source, target, delayed) -> None:
        rank, block = key
        shard = self.lo.shard(stage, block, rank)
        place = self.lo.group_index(stage, block)
        rows = self.lo.block_rows(stage, layer, place, rank)
        scale = 1.0
        if source == "x":
            gain = self.gains[stage.norm, layer]
            inputs = x * gain[shard if len(gain) > 1 else 0]
            scale = 1 / np.sqrt(np.mean(x**2) + self.spec.norm_eps)
        else:
            inputs = self.buffers[source].read(it, shard, 0, stage.cols)
        y = self._multiply(stage, key, rows, inputs) * scale
        if (row_scales := self.row_scales.get((stage.name, layer))) is not None:
            y = y * np.where(rows == PADDING, 0, row_scales[shard][rows])
        bias = self.biases.get((stage.name, layer))
        if bias is not None:
            y = y + np.where(rows == PADDING, 0, bias[shard][rows])
        inside = rows != PADDING
        if target == "mlp":
            gate, up = y[0::2], y[1::2]
            values, ids = (gate / (1 + np.exp(-gate)) * up)[inside[0::2]], rows[0::2][inside[0::2]]
        else:
            values, ids = y[inside], rows[inside]
        if not len(ids):
            return
        assert (np.diff(ids) == 1).all(), "a block publishes one run"
        if target.endswith("_out"):
            how = self.s.reduce(stage.name, layer)
            if target + "_delayed" in self.buffers:
                self.buffers[target + "_delayed"].publish(it, shard, ids[0], values)
            if how is Reduce.DELAYED:
                values = values + delayed[shard][ids]
            elif how is Reduce.OWN:
                values = values * np.sqrt(self.spec.num_lanes)
        self.buffers[target].publish(it, shard, ids[0], values)

    def _delayed(self, stage, layer, it):
        """What the other lanes sent `delay` layers ago, for every shard."""
        if not stage.target.endswith("_out") or self.s.reduce(stage.name, layer) is not Reduce.DELAYED:
            return None
        buffer = self.buffers[stage.target + "_delayed"]
        sent = [buffer.read(it - self.spec.delay, i, 0, stage.rows) for i in range(self.s.num_shards)]
        return [sum(o for j, o in enumerate(sent) if j != shard) for shard in range(self.s.num_shards)]

    def _join(self, stage, layer, it, key, x) -> None:
        """Every block gathers the module output and adds it to its own copy of the stream."""
        rank, block = key
        shard, buffer = self.lo.shard(stage, block, rank), self.buffers[stage.target]
        if self.s.reduce(stage.name, layer) is Reduce.NOW:
            for j in range(self.s.num_shards):
                x[key] = x[key] + buffer.read(it, j, 0, stage.rows)
        else:
            x[key] = x[key] + buffer.read(it, shard, 0, stage.rows)

    def _multiply(self, stage, key, rows, inputs) -> np.ndarray:
        """rows x K from the stream: warps hold parts of K, sums are added in warp order."""
        lo, tiling = self.lo, self.lo.tilings[stage.name]
        parts, steps, (high, wide) = tiling.k_parts, lo.unit_fragments(stage), lo.fragment(stage)
        wide *= lo.weights[stage.name].pack
        if not self.exact:
            inputs = wire.from_half(wire.to_half(inputs.astype(np.float32), self.spec.dtype), self.spec.dtype)
        padded = np.zeros(lo.padded_k(stage))
        padded[: len(inputs)] = inputs
        units = len(rows) // tiling.unit_rows
        taken = []  # [fragments, warps, *fragment] of each ring slot, in the order in which warps consume them
        while len(taken) * lo.fragments < units * steps:
            slot = self.streams[key].take()
            if lo.weights[stage.name].format:
                fragments = narrow_fragments(lo, stage, slot)
            else:
                fragments = wire.from_half(slot.view(np.uint16), self.spec.dtype)
                fragments = fragments[: lo.fragments * WARPS * high * wide].astype(np.float64)
            taken.append(fragments.reshape(lo.fragments, WARPS, high, wide))
        if not units:
            return np.zeros(0)
        fragments = np.concatenate(taken)[: units * steps]
        fragments = fragments.reshape(units, steps, WARPS // parts, parts, high, wide)
        slices = padded.reshape(parts, steps, wide)
        partial = np.einsum("usgprk,psk->ugrp", fragments, slices, optimize=True)
        return sum(partial[..., part] for part in range(parts)).reshape(-1)

    def _attention(self, layer, it, position) -> None:
        spec, d = self.spec, self.spec.head_dim
        heads, kv = self.s.shard_heads, self.s.shard_kv_heads
        group = heads // kv
        for shard in range(self.s.num_shards):
            row = self.buffers["qkv"].read(it, shard, 0, (heads + 2 * kv) * d).reshape(-1, d)
            q, k, v = row[:heads], row[heads : heads + kv], row[heads + kv :]
            q, k = (self._rotate(q, layer, "q_norm", position), self._rotate(k, layer, "k_norm", position))
            self.kv[layer][shard].append((k, v))
            window = spec.windows[layer] or position + 1
            keys = np.stack([k for k, _ in self.kv[layer][shard]][-window:])  # [n, K, d]
            values = np.stack([v for _, v in self.kv[layer][shard]][-window:])
            out = np.empty((heads, d))
            for h in range(heads):
                score = keys[:, h // group] @ q[h] / np.sqrt(d)
                weight = np.exp(score - score.max())
                out[h] = weight @ values[:, h // group] / weight.sum()
            self.buffers["attention"].publish(it, shard, 0, out.reshape(-1))

    def _rotate(self, x, layer, norm, position) -> np.ndarray:
        if self.spec.qk_norm:
            x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + self.spec.norm_eps)
            x = x * self.gains[norm, layer]
        half = self.spec.head_dim // 2
        z = (x[:, :half] + 1j * x[:, half:]) * (self.rope[position, 0] + 1j * self.rope[position, 1])
        return np.concatenate([z.real, z.imag], -1)

    def _head(self, x) -> np.ndarray:
        stage, spec, s = self.s.stage("lm_head"), self.spec, self.s
        streams = self._streams_of(x)
        logits = np.full(spec.vocab_size, np.nan)
        for rank, block in self.streams:
            shard = self.lo.shard(stage, block, rank)
            rows = self.lo.block_rows(stage, 0, self.lo.group_index(stage, block), rank)
            if spec.head is Head.VOCAB_PARALLEL:
                inputs, first = self._normed(streams[shard], shard), shard * stage.rows
            else:
                first = s.head_rows(rank)[0]
                normed = [self._normed(h, i) for i, h in enumerate(streams)]
                if spec.num_lanes == 1:
                    inputs = normed[0]
                elif spec.head is Head.SUM_THEN_NORM:
                    inputs = self._normed(streams.sum(0), 0)
                elif spec.head is Head.CONCAT:
                    inputs = np.concatenate(normed)
                else:
                    inputs = np.mean(normed, 0)
            y = self._multiply(stage, (rank, block), rows, inputs)
            if (row_scales := self.row_scales.get((stage.name, 0))) is not None:
                y = y * np.where(rows == PADDING, 0, row_scales[0][first + rows])
            inside = rows != PADDING
            logits[first + rows[inside]] = y[inside]
        return logits

    def _normed(self, h, lane) -> np.ndarray:
        gain = self.gains["norm", 0]
        return h / np.sqrt(np.mean(h**2) + self.spec.norm_eps) * gain[lane if len(gain) > 1 else 0]

    def _streams_of(self, x) -> np.ndarray:
        """The residual stream of every shard; all blocks of a shard must hold the same one."""
        out = [None] * self.s.num_shards
        stage = self.s.stage("qkv_proj")
        for (rank, block), value in x.items():
            shard = self.lo.shard(stage, block, rank)
            if out[shard] is None:
                out[shard] = value
            assert np.array_equal(out[shard], value), "two blocks of a shard disagree on x"
        return np.stack(out)


def pack_model(lowering: CudaLowering, weights, narrow=None) -> tuple:
    """Arenas of every rank and the small tensors, from canonical weights {name: float32 array}.

    narrow  gives a narrow weight as it is stored, by its name
    """
    from kog_triton.schedule.narrow_packing import pack_narrow
    from kog_triton.schedule.packing import pack_blocks
    from kog_triton.schedule.schedule import Op, Scope
    from kog_triton.schedule.shards import canonical, shard_bias, shard_matrix

    s, spec = lowering.schedule, lowering.schedule.spec
    arenas, gains, biases = [], {}, {}
    for rank in range(s.num_ranks):
        arena = np.zeros(lowering.stream_ring_slots(rank) * lowering.num_blocks * lowering.ring_slot_bytes, np.uint8)
        cursors = {b: b * lowering.ring_slot_bytes for b in range(lowering.num_blocks)}
        for segment in s.segments:
            for layer in range(segment.repeat):
                for stage in segment.stages:
                    if stage.op is not Op.MATVEC:
                        continue
                    names = [canonical(stage, w, layer) for w in stage.weights]
                    if lowering.weights[stage.name].format:
                        stored, pack = (matrices_of(s, stage, [narrow(n) for n in names]), pack_narrow)
                    else:
                        parts = [shard_matrix(s, stage, weights[n]) for n in names]
                        stored = wire.to_half(np.concatenate(parts, 1), spec.dtype)
                        pack = pack_blocks
                    for block in range(lowering.num_blocks):
                        w = stored[lowering.shard(stage, block, rank)]
                        if stage.scope is Scope.ALL and s.num_ranks > 1:
                            first, last = s.head_rows(rank)
                            w = w[first:last]
                        (slots,) = pack(lowering, stage, layer, [block], rank, w)
                        for slot in slots:
                            at, content = cursors[block], slot.reshape(-1).view(np.uint8)
                            arena[at : at + len(content)] = content
                            cursors[block] += lowering.num_blocks * lowering.ring_slot_bytes
        arenas.append(arena)
    for segment, stage in s.walk():
        for layer in range(segment.repeat):
            if stage.norm:
                name = "norm" if stage.norm == "norm" else stage.norm
                gains[name, layer] = weights[canonical(stage, stage.norm, layer)]
            if stage.biases:
                parts = [shard_bias(s, stage, weights[canonical(stage, b, layer)]) for b in stage.biases]
                biases[stage.name, layer] = np.concatenate(parts, 1)
    for layer in range(spec.num_layers if spec.qk_norm else 0):
        for which in ("q_norm", "k_norm"):
            gains[which, layer] = weights[f"layers.{layer}.{which}"]
    return arenas, gains, biases, weights["embed"]


def spec_of(**changes) -> ModelSpec:
    """A small odd model: rows that divide by nothing, a group of three, K that needs padding."""
    from kog_triton.model.spec import Rope

    layers = changes.pop("num_layers", 3)
    base = {
        "family": "tiny",
        "num_layers": layers,
        "hidden_size": 56,
        "intermediate_size": 88,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 101,
        "max_context": 64,
        "norm_eps": 1e-5,
        "rope": Rope(),
        "windows": (0,) * layers,
        "reduce_attention": (Reduce.NOW,) * layers,
        "reduce_mlp": (Reduce.NOW,) * layers,
    }
    return ModelSpec(**(base | changes))


def f16_spec(**changes) -> ModelSpec:
    """As `spec_of`, in float16."""
    return spec_of(dtype=DType.F16, **changes)
