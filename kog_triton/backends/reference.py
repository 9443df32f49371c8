"""The reference backend: torch walks the schedule and says what every kernel must compute.

It runs the stages in the schedule's order, one function for each. All ranks and lanes live in this process:
tensors carry a leading shard dimension. Arithmetic is float32 whatever the weights are stored in.

    walk="stage"  every stage is one batched matrix product: fast enough for people on a CPU
    walk="block"  the same stages block by block and K part by K part, as a lowering cuts them: the oracle
                  that owners cover every row once and that partial sums add up

Shapes: S shards, T tokens, H query heads and K key/value heads of a shard, d head_dim.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from kog_triton.backends import STAGE_WRITES, Availability, BackendOptions, WeightSource, block_walk
from kog_triton.backends.device import TORCH_DTYPES, gpu_of
from kog_triton.backends.host_serving import HostServing
from kog_triton.backends.kv_cache import KVCache
from kog_triton.backends.mailbox import Mailbox
from kog_triton.errors import DeviceError, RequestError
from kog_triton.model.spec import DTYPES, DType, Head, ModelSpec, Reduce
from kog_triton.schedule.lowering import Partition, default_partition
from kog_triton.schedule.rope import rope_table
from kog_triton.schedule.schedule import Epilogue, Op, Prologue, Schedule, Stage, build
from kog_triton.schedule.shards import canonical, shard_bias, shard_matrix
from kog_triton.schedule.topology import VENDORS, check_device

Tensor = torch.Tensor
CHUNK = 256  # prompt tokens of one pass: bounds the score matrix at CHUNK x context a head
# Below this, waking a second thread costs more than it brings: the demo (36 MB) decodes 1.5 times as
# fast with one thread as with two on a two-core CPU (benchmarks/README.md#demo-on-a-cpu).
ONE_THREAD_BYTES = 128 << 20


Values = dict[str, Tensor]  # exchanges and x, by name
Delayed = dict[str, list[Tensor]]  # outputs of o_proj and down_proj, layer by layer
Append = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]  # a layer's new k and v to all


class WhenUsed(Mapping[tuple[str, int], Tensor]):
    """Matrices by stage and layer, each read again whenever it is asked for."""

    def __init__(self, read: Callable[[tuple[str, int]], Tensor]) -> None:
        self._read = read

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        return self._read(key)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(())  # none is held

    def __len__(self) -> int:
        return 0


class ReferenceBackend:
    """`keeps` its matrices, or reads each whenever a pass uses it: to judge a model of which a GPU holds no float32."""

    name = "reference"
    vendors = (*VENDORS, "cpu")
    rank = 9  # float32, for correctness: what is left where nothing else runs
    num_devices = 1  # ranks and lanes share one process and one device

    @classmethod
    def availability(cls) -> Availability:
        return Availability(True)

    @classmethod
    def why_not_narrow(cls, spec: ModelSpec) -> str:
        """Nothing: it runs them by their values in float32."""
        return ""

    def __init__(self, weights: WeightSource, options: BackendOptions, keeps: bool = True) -> None:
        if options.prefill == "library":
            raise RequestError("the reference backend has one prefill: leave --prefill at auto")
        stored = DTYPES["fp32" if options.dtype == "auto" else options.dtype]
        self.spec = weights.spec.replace(dtype=stored, kv_dtype=DType.F32, narrow=())
        self.options = options
        self.device = _device(options.device)
        self.gpu = gpu_of(self.device)
        self.schedule: Schedule = build(self.spec, options.num_gpus)
        self.max_context = options.max_context or self.spec.max_context
        self.partition: Partition | None = None
        if options.walk == "block":
            self.partition = default_partition(self.schedule)
        elif options.walk != "stage":
            raise RequestError(f"walk {options.walk!r}: the reference backend walks stage or block")
        self._keeps = keeps
        self._load(weights)
        self._rope = torch.empty(0, 2, self.spec.head_dim // 2, device=self.device)
        self.kv = self._new_kv(options.num_slots, self.max_context)
        self._beat: Callable[[], None] = lambda: None

    # ---- weights ----

    def _get(self, weights: WeightSource, name: str) -> Tensor:
        tensor: Tensor = weights.load(name)
        return tensor.to(self.device, TORCH_DTYPES[self.spec.dtype])

    def _matrix(self, weights: WeightSource, stage: Stage, layer: int) -> Tensor:
        """[S, rows, cols]; gate above up."""
        names = [canonical(stage, w, layer) for w in stage.weights]
        parts: list[Tensor] = [shard_matrix(self.schedule, stage, self._get(weights, n)) for n in names]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def _matrices(self, weights: WeightSource) -> Mapping[tuple[str, int], Tensor]:
        if not self._keeps:
            return WhenUsed(lambda key: self._matrix(weights, self.schedule.stage(key[0]), key[1]))
        kept: dict[tuple[str, int], Tensor] = {}
        for segment, stage in self.schedule.walk():
            for layer in range(segment.repeat):
                if "embed" in stage.weights and stage.op is Op.MATVEC:
                    kept[stage.name, layer] = kept["embed", 0]
                elif stage.weights:
                    kept[stage.name, layer] = self._matrix(weights, stage, layer)
        return kept

    def _load(self, weights: WeightSource) -> None:
        s, get = self.schedule, partial(self._get, weights)
        self._weights = self._matrices(weights)
        self._biases: dict[tuple[str, int], Tensor] = {}  # [S, rows]
        self._gains: dict[tuple[str, int], Tensor] = {}  # [S or 1, 1, hidden]
        for segment, stage in s.walk():
            for layer in range(segment.repeat):
                key = (stage.name, layer)
                if stage.biases:
                    parts = [shard_bias(s, stage, get(canonical(stage, b, layer))) for b in stage.biases]
                    self._biases[key] = torch.cat(parts, 1).float()
                if stage.norm:
                    self._gains[key] = get(canonical(stage, stage.norm, layer)).float()[:, None]
        if self.spec.qk_norm:
            for layer in range(self.spec.num_layers):
                for which in ("q_norm", "k_norm"):
                    self._gains[which, layer] = get(f"layers.{layer}.{which}").float()

    def memory_bytes(self) -> dict[str, int]:
        seen = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self._weights.values()}
        return {"weights": sum(seen.values()), "kv_cache": self.kv.nbytes, "other": self._rope.nbytes}

    def _new_kv(self, num_slots: int, limit: int) -> KVCache:
        return KVCache(self.schedule, num_slots, limit, self.device)

    def close(self) -> None:
        self._weights = {}
        self.kv.clear()

    # ---- entry points ----

    def generate(self, mailbox: Mailbox) -> None:
        """Serve until idle: prompts in chunks, then one token a step, slot by slot."""
        self._beat = mailbox.beat
        threads = torch.get_num_threads()
        if self.memory_bytes()["weights"] < ONE_THREAD_BYTES:
            torch.set_num_threads(1)
        try:
            HostServing(self, mailbox, CHUNK).run()
        finally:
            torch.set_num_threads(threads)

    @torch.inference_mode()
    def forward(self, slot: int, token_ids: Sequence[int], start: int, last_only: bool) -> np.ndarray:
        """Run tokens at positions start.. in a slot; logits float32 [T or 1, vocab]."""
        self.kv.reserve(slot, start + len(token_ids))

        def append(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return self.kv.append(layer, slot, start, k, v)

        values = {"token": torch.tensor(list(token_ids), device=self.device)}
        delayed: dict[str, list[Tensor]] = {"o_proj": [], "down_proj": []}
        for segment in self.schedule.segments:
            if segment.name == "tail" and last_only:
                values["x"] = values["x"][:, -1:]
            for layer in range(segment.repeat):
                for stage in segment.stages:
                    self.run(stage, layer, values, delayed, start, append)
                self._beat()  # a pass of 256 positions of a large model takes a CPU half a minute
        return values["logits"].cpu().numpy()

    def forward_logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits of every position, float32 [tokens, vocab], computed beside the slots."""
        if len(token_ids) > self.max_context:
            raise RequestError(f"{len(token_ids)} tokens do not fit the context of {self.max_context}")
        ours, self.kv = self.kv, self._new_kv(1, len(token_ids))
        try:
            chunks = range(0, len(token_ids), CHUNK)
            parts = [self.forward(0, token_ids[i : i + CHUNK], i, False) for i in chunks]
            return np.concatenate(parts)
        finally:
            self.kv = ours

    @torch.inference_mode()
    def run_stage(self, stage: str, layer: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """One stage on logical tensors (STAGE_READS, STAGE_WRITES); float32.

        Sampling is kog_triton.sampling's. RequestError if the model has no such stage.
        """
        values = dict(state)
        start = 0
        delayed = {stage: [state["delayed"]] * (layer + 1) if "delayed" in state else []}
        if stage == "embed":
            values["token"] = state["token_ids"]
        elif stage == "attention":
            values["qkv"] = torch.cat([state[name].flatten(2) for name in "qkv"], 2)
            start = state["keys"].shape[2]

        def append(_: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            values["keys"] = torch.cat([state["keys"], k], 2)
            values["values"] = torch.cat([state["values"], v], 2)
            return values["keys"], values["values"]

        known = [s for _, s in self.schedule.walk() if s.name == stage and s.op is not Op.SAMPLE]
        if not known:
            raise RequestError(f"the reference backend has no stage named {stage!r} in this model")
        self.run(known[0], layer, values, delayed, start, append)
        if stage == "qkv_proj":
            values["q"], values["k"], values["v"] = self.split_heads(values["qkv"])
        return {name: values[name] for name in STAGE_WRITES[stage]}

    # ---- stages ----

    def run(self, stage: Stage, layer: int, v: Values, delayed: Delayed, start: int, append: Append) -> None:
        """One stage of the schedule: its source read from `v`, its target (and x) written there."""
        if stage.op is Op.EMBED:
            v["x"] = self.embed(v["token"])
        elif stage.op is Op.ATTENTION:
            v["attention"] = self.attention(layer, v["qkv"], start, append)
        elif stage.op is Op.MIX:
            v["y"] = self.mix(v["x"])
        elif stage.op is Op.MATVEC:
            out = self.matvec(stage.name, layer, v[stage.source])
            if stage.epilogue is Epilogue.SILU_MUL:
                out = self.silu_mul(out)
            elif stage.epilogue is Epilogue.RESIDUAL:
                v["x"] = self.residual(stage.name, layer, v["x"], out, delayed[stage.name])
            elif stage.epilogue is Epilogue.LOGITS:  # the lanes' own rows, or one for all
                own = self.spec.head is Head.VOCAB_PARALLEL
                out = out.transpose(0, 1).flatten(1) if own else out[0]
            v[stage.target] = out

    def embed(self, token_ids: Tensor) -> Tensor:  # [S, T, hidden]
        rows = self._weights["embed", 0][0][token_ids].float()
        return rows.expand(self.schedule.num_shards, -1, -1)

    def matvec(self, name: str, layer: int, x: Tensor) -> Tensor:
        """target <- weight @ prologue(source) + bias; [S, T, cols] to [S, T, rows]."""
        stage = self.schedule.stage(name)
        w = self._weights[name, layer]
        if stage.prologue is Prologue.RMS_NORM:
            x = self.rms_norm(x, self._gains[name, layer])
        if self.partition is not None:
            y = block_walk.matvec(self.partition, stage, layer, w, x)
        else:
            y = torch.matmul(x, w.float().mT)
        bias = self._biases.get((name, layer))
        return y if bias is None else y + bias[:, None]

    def rms_norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """x / rms(x) * gain over the last dimension (arXiv 1910.07467)."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.spec.norm_eps) * gain

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [S, T, H, d], k and v [S, T, K, d], before norm and rotation."""
        y = qkv.unflatten(-1, (-1, self.spec.head_dim))
        heads, kv = self.schedule.shard_heads, self.schedule.shard_kv_heads
        return y[:, :, :heads], y[:, :, heads : heads + kv], y[:, :, heads + kv :]

    def rotate(self, layer: int, x: Tensor, norm: str, start: int) -> Tensor:
        """[S, T, heads, d] normalized per head if the model asks, then rotated to positions start.. ."""
        if self.spec.qk_norm:
            x = self.rms_norm(x, self._gains[norm, layer])
        table = self._rope_rows(start + x.shape[1])[start:]
        cos, sin = table[:, 0, None], table[:, 1, None]  # [T, 1, d / 2]
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, layer: int, qkv: Tensor, start: int, append: Append) -> Tensor:
        """softmax(q k / sqrt(d)) v over the keys that each position sees; [S, T, H * d]."""
        q, k, v = self.split_heads(qkv)
        q, k = self.rotate(layer, q, "q_norm", start), self.rotate(layer, k, "k_norm", start)
        keys, values = append(layer, k.transpose(1, 2), v.transpose(1, 2))  # [S, K, n, d]
        position = torch.arange(start, start + q.shape[1], device=self.device)
        shards, count, heads, d = q.shape
        kv, length = keys.shape[1], keys.shape[2]
        window = self.spec.windows[layer]
        if window and count == 1 and length > window:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
            length = window
        # One matrix product a KV head, its query heads side by side: [S, K, group * T, d]
        q = q.transpose(1, 2).reshape(shards, kv, heads // kv * count, d)
        score = torch.matmul(q * (1 / math.sqrt(d)), keys.mT)
        if count > 1:
            key = torch.arange(length, device=q.device)
            hidden = key > position[:, None]
            if window:
                hidden |= key <= position[:, None] - window
            score = score.unflatten(2, (-1, count)).masked_fill(hidden, -math.inf).flatten(2, 3)
        out = torch.matmul(torch.softmax(score, -1), values)
        return out.reshape(shards, heads, count, d).transpose(1, 2).flatten(2)

    def residual(self, name: str, layer: int, x: Tensor, o: Tensor, delayed: list[Tensor]) -> Tensor:
        """x joined with the module outputs o [S, T, hidden] as the layer's `Reduce` says; o joins `delayed`."""
        delayed.append(o)
        how = self.schedule.reduce(name, layer)
        if how is Reduce.NOW:
            return x + (o if len(o) == 1 else o.sum(0, keepdim=True))
        if how is Reduce.OWN:
            return x + math.sqrt(self.spec.num_lanes) * o
        old = delayed[layer - self.spec.delay]
        return x + o + (old.sum(0, keepdim=True) - old)

    def silu_mul(self, y: Tensor) -> Tensor:  # [S, T, 2 F] to [S, T, F]
        gate, up = y.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def mix(self, x: Tensor) -> Tensor:
        """The one vector that the head scores, of the lanes' residual streams: [1, T, cols]."""
        gain = self._gains["mix", 0]
        if self.spec.head is Head.SUM_THEN_NORM:
            return self.rms_norm(x.sum(0, keepdim=True), gain)
        normed = self.rms_norm(x, gain)
        if self.spec.head is Head.CONCAT:
            return normed.transpose(0, 1).flatten(1)[None]
        return normed.mean(0, keepdim=True)

    def _rope_rows(self, count: int) -> Tensor:
        """cos and sin of positions 0 .. count - 1, [count, 2, d / 2]; the table grows by doubling."""
        if len(self._rope) < count:
            size = max(count, 2 * len(self._rope), 1024)
            table = rope_table(self.spec.rope, self.spec.head_dim, size)
            self._rope = torch.from_numpy(table).to(self.device)
        return self._rope[:count]


def _device(name: str) -> torch.device:
    """The torch device behind `--device`: a CPU unless the caller names a GPU, which must be there."""
    if name in ("", "cpu"):
        return torch.device("cpu")
    check_device(name)
    if not torch.cuda.is_available():
        raise DeviceError(f"device {name!r}: torch sees no GPU here; leave --device out to use the CPU")
    device = torch.device("cuda")
    gpu = gpu_of(device)
    if gpu is None or name not in (gpu.vendor, gpu.name):
        here = torch.cuda.get_device_name()
        raise DeviceError(f"device {name!r} was asked for, and this machine has {here}")
    return device
