"""One pass of torch's matrix products over many tokens: it leaves their keys and values in a cache.

The formulas are backends/reference.py's. The residual streams are float32; what enters a matrix
product is in the model's dtype, as in the kernels. Nothing here waits for the device or asks it for
a value, so that a pass can be captured in a CUDA graph. Shapes: see weights.py.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from kog_triton.backends.embedding import Embedding
from kog_triton.backends.prefill.fused_ahead import FUSED, Arguments, FusedAhead
from kog_triton.backends.prefill.weights import LayerWeights, Matrices
from kog_triton.model.spec import Reduce
from kog_triton.schedule.schedule import Schedule

Tensor = torch.Tensor
# Of a product, by its time: what reads the weights alone takes as long as so many tokens
# (benchmarks/cuda-log.md#one-copy: 190 of 8B's layer, 340 of 1B's).
PASS_TOKENS = 256
# Behind so many positions attention takes longer than a product, and is cut into calls of so many tokens: a slice ends
# between them (slices.py). They still fill a GPU: 256 tiles of 128 rows of Llama's 32 heads.
DEEP, DEEP_ROWS = 8192, 1024
MASK_STEP = 16  # elements to which rows of a mask are padded: what fused attention can load


class Outputs:
    """Module outputs of a pass [S, T, hidden], where all shards are on one GPU. Of several GPUs: ranks.py."""

    def send(self, o: Tensor) -> Tensor:
        return o

    def all(self, own: Tensor) -> Tensor:
        """Those of all shards, on this GPU; `own` was sent last."""
        return own


class PrefillPass:
    """The layers of one model, or of a rank's shards. `rope` is float32 [positions, 2, d / 2]: cosines and sines, by
    position.

    fused    what lies between matrix products runs in Triton's kernels (fused.py)
    outputs  None: all are of this GPU
    """

    def __init__(
        self,
        schedule: Schedule,
        embed: Embedding,
        layers: Sequence[LayerWeights],
        matrices: Matrices,
        rope: Tensor,
        fused: bool = False,
        outputs: Outputs | None = None,
    ) -> None:
        spec = schedule.spec
        self.spec, self.embed, self.layers, self.rope = spec, embed, layers, rope
        self.matrices, self.dtype = matrices, embed.dtype
        self.device, self._lanes = embed.device, schedule.shards_per_rank
        self._outputs = outputs or Outputs()
        self._fuses = fused
        self._ahead: FusedAhead | None = None
        self._num_shards = schedule.num_shards
        self._flash = aligns_ends(embed.device, self.dtype, spec.head_dim)
        heads, kv, d = schedule.shard_heads, schedule.shard_kv_heads, spec.head_dim
        # Of a token: queries, keys and values; the attention's outputs; a third of the MLP. And of a key that it
        # sees: a multiply-add takes as long there (benchmarks/cuda-log.md#slices).
        hidden, ffn = spec.hidden_size, schedule.shard_ffn
        self._multiply_adds = hidden * (heads + 2 * kv) * d, hidden * heads * d, hidden * ffn
        self._seen = 2 * heads * d

    @cached_property
    def _fused(self) -> Any:
        """Imported by the first pass: Triton takes a second, of a start whose prompt needs none."""
        if self._ahead is not None:
            self._ahead.wait()
        return import_module(FUSED) if self._fuses else None

    def compile_ahead(self, caches: Sequence[Tensor], told: tuple[Tensor, Tensor] | None = None) -> None:
        """Begin to compile what Triton runs between products; the first pass waits for it.

        caches  as of `layers_of`, of every kind that passes will fill
        told    a `Told`'s words, and the cache of passes that are told
        """
        if not self._fuses:
            return
        w, lanes, hidden = self.layers[0], self._lanes, self.spec.hidden_size
        qkv, _, ffn = (amount // hidden for amount in self._multiply_adds)

        def token(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(lanes, 1, width, dtype=dtype, device="meta")

        added = None
        if self.spec.num_lanes == 1:  # as `_joined`
            added = token(hidden, self.dtype if self._num_shards == 1 else torch.float32)
        arguments = Arguments(
            token(hidden, torch.float32),
            w.attention_norm,
            self.spec.norm_eps,
            self.dtype,
            added,
            token(2 * ffn, self.dtype),
            token(qkv, self.dtype),
            w.qk_norm,
            self.rope,
            [cache[0] for cache in caches],
            told and (told[0], told[1][0]),
        )
        self._ahead = FusedAhead(arguments, self.device)

    def run(self, ids: Tensor, first: int, cache: Tensor, head: "ToHead | None" = None) -> None:
        """All of `layers_of`."""
        for _ in self.layers_of(ids, first, cache, head):
            pass

    def layers_of(
        self, ids: Tensor, first: int, cache: Tensor, head: "ToHead | None" = None, told: "Told | None" = None
    ) -> Iterator["Work"]:
        """Run tokens ids [T] at positions first.. and put their keys and values in `cache`, a product or an
        attention after the other: gives first what the next one is.

        cache  [layers, S, K, 2, positions, d]; positions before `first` must be filled
        told   says to the device where the tokens stand; `first` says it to the host alone
        Of the last layer's outputs nobody reads but the `head`, and that one token's.
        """
        spec = self.spec
        x = self.embed.rows(ids).expand(self._lanes, -1, -1).contiguous()
        end = first + len(ids)
        bounds = {} if told else {w: self._bounds(first, end, w) for w in set(spec.windows)}
        delayed: dict[str, list[tuple[Tensor, Tensor]]] = {"attention": [], "mlp": []}
        o = x  # until a module has put something out
        (qkv, outputs, mlp), rows = self._multiply_adds, len(ids)
        tokens = rows + PASS_TOKENS
        for index, (w, window) in enumerate(zip(self.layers, spec.windows, strict=True)):
            yield Work("qkv_proj", tokens * qkv, rows)
            if index == 0:
                y = self._norm(x, w.attention_norm)
            else:
                how = spec.reduce_mlp[index - 1]
                y = self._joined(x, o, how, delayed["mlp"], w.attention_norm)
            q = self._queries(index, w, y, first, cache[index], told)
            last = index == spec.num_layers - 1
            if last and head is None:
                break
            if told is not None:
                yield Work("told", rows * end * self._seen, rows)
                a = told.attend(q, cache[index], window)
            else:
                start, mask = bounds[window]
                parts = []
                for part in rows_at_once(first, end):
                    seen, count = first + part.stop - start, part.stop - part.start
                    yield Work("attention", count * (seen - count / 2) * self._seen, count)
                    kv = cache[index, :, :, :, start : start + seen]
                    masked = None if mask is None else mask[part, :seen]
                    parts.append(attend(q[:, :, part], kv, masked))
                a = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            if last and head is not None:
                rows, x, a = 1, head.of(x), head.of(a)
                tokens = rows + PASS_TOKENS
                delayed = {
                    module: [(head.of(own), head.of(every)) for own, every in late] for module, late in delayed.items()
                }
            yield Work("o_proj", tokens * outputs, rows)
            o = self._outputs.send(self.matrices.product(index, "o_proj", a, w.o_bias))
            yield Work("gate_up_proj", tokens * 2 * mlp, rows)
            how = spec.reduce_attention[index]
            y = self._joined(x, o, how, delayed["attention"], w.mlp_norm)
            h = self.matrices.product(index, "gate_up_proj", y, w.gate_up_bias)
            yield Work("down_proj", tokens * mlp, rows)
            h = self._gated(h)
            o = self._outputs.send(self.matrices.product(index, "down_proj", h, w.down_bias))
        if head is not None:
            yield Work("head", 1.0, 1)  # as good as nothing
            self._join(x, o, spec.reduce_mlp[-1], delayed["mlp"])
            head.streams.copy_(x[:, 0])

    def _joined(self, x: Tensor, o: Tensor, how: Reduce, delayed: list[tuple[Tensor, Tensor]], gain: Tensor) -> Tensor:
        """Add module outputs o to x in place, and what the next module reads of it."""
        if self._fused is not None and self.spec.num_lanes == 1:
            total = total_of(self._outputs.all(o))
            return self._fused.normed(x, gain, self.spec.norm_eps, self.dtype, total)
        self._join(x, o, how, delayed)
        return self._norm(x, gain)

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        """x / rms(x) * gain in the products' dtype; [S, T, hidden]."""
        if self._fused is not None:
            return self._fused.normed(x, gain, self.spec.norm_eps, self.dtype, None)
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        normed = rms_norm(x, x.shape[-1:], None, self.spec.norm_eps)
        return torch.mul(normed, gain, out=out)

    def _gated(self, h: Tensor) -> Tensor:
        if self._fused is not None:
            return self._fused.gated(h)
        gate, up = h.unflatten(-1, (-1, 2)).unbind(-1)
        return silu(gate).mul_(up)

    def _queries(
        self, layer: int, w: LayerWeights, y: Tensor, first: int, cache: Tensor, told: "Told | None"
    ) -> Tensor:
        """Queries [S, H, T, d] of normed y; keys, values go to a layer's cache [S, K, 2, n, d]."""
        spec, end = self.spec, first + y.shape[1]
        qkv = self.matrices.product(layer, "qkv_proj", y, w.qkv_bias)
        if self._fused is not None:
            words = None if told is None else told.words
            eps = spec.norm_eps
            return self._fused.rotated(qkv, w.qk_norm, self.rope, eps, first, cache, words)
        qkv = qkv.unflatten(-1, (-1, spec.head_dim))
        rotating = qkv.shape[2] - cache.shape[1]
        heads = rotating - cache.shape[1]
        rotating_heads = qkv[:, :, :rotating].float()
        if w.qk_norm is not None:
            normed = rms_norm(rotating_heads, rotating_heads.shape[-1:], None, spec.norm_eps)
            rotating_heads = normed.mul_(w.qk_norm)
        low, high = rotating_heads.chunk(2, -1)  # [S, T, H + K, d / 2]
        cos, sin = self.rope[first:end, None].unbind(-2)
        rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
        home = cache[:, :, :, first:end]
        home[:, :, 0].copy_(rotated[:, :, heads:].transpose(1, 2))
        home[:, :, 1].copy_(qkv[:, :, rotating:].transpose(1, 2))
        return rotated[:, :, :heads].to(self.dtype).transpose(1, 2)

    def _join(self, x: Tensor, o: Tensor, how: Reduce, delayed: list[tuple[Tensor, Tensor]]) -> None:
        """Add module outputs o [S, T, hidden] to x in place; `delayed` keeps what arrives late: o, and all ranks'."""
        lanes, delay = self.spec.num_lanes, self.spec.delay
        every = self._outputs.all(o)
        if how is Reduce.NOW:
            x.add_(total_of(every))
        elif how is Reduce.OWN:
            x.add_(o, alpha=math.sqrt(lanes))
        else:
            old, old_every = delayed[0]
            x.add_(o).add_(total_of(old_every)).sub_(old)
        delayed.append((o, every))
        if len(delayed) > delay:
            del delayed[0]

    def _bounds(self, first: int, end: int, window: int) -> tuple[int, Tensor | None]:
        """The first key that queries at [first, end) need, `start`, and which ones each sees; None: see `causal`."""
        if (first == 0 or self._flash) and (not window or end <= window):
            return 0, None
        window = window or end
        start = max(0, first + 1 - window)
        return start, band(first, end, start, window, self.dtype, self.embed.device)


class Work(NamedTuple):
    """A product or an attention, with what is queued around it: its kind, a shard's multiply-adds, and its tokens."""

    kind: str
    amount: float
    rows: int


class Told(Protocol):
    """Where a pass's tokens stand, by words of the device (suffixes.py)."""

    words: Tensor

    def attend(self, q: Tensor, cache: Tensor, window: int) -> Tensor:
        """Queries [1, H, T, d] to [1, T, H d], in a layer's cache [1, K, 2, n, d] of the first slot."""
        ...


class ToHead(NamedTuple):
    """What a head needs of a pass.

    streams  [S, hidden]: those of one token behind all layers
    token    int64 [1]: its number in the pass
    """

    streams: Tensor
    token: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """[S, T, n] to [S, 1, n]."""
        return rows.index_select(1, self.token)


def total_of(every: Tensor) -> Tensor:
    """The sum over shards of [S, T, hidden], [1, T, hidden]: of one as it is, of several float32."""
    return every if len(every) == 1 else every.sum(0, keepdim=True, dtype=torch.float32)


def rows_at_once(first: int, end: int) -> list[slice]:
    """Of queries at [first, end), those whose attention is one call: a function of positions alone."""
    count = end - first
    step = DEEP_ROWS if end > DEEP else count
    return [slice(at, min(at + step, count)) for at in range(0, count, step)]


def band(first: int, end: int, start: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to scores of queries [first, end) by keys [start, end): 0, or the least number.

    Finite, because a row whose first tile of keys is all hidden would make NaN of infinities.
    """
    query = torch.arange(first, end, device=device)[:, None]
    key = torch.arange(start, end, device=device)
    count = end - start
    width = -(-count // MASK_STEP) * MASK_STEP
    mask = torch.zeros(end - first, width, dtype=dtype, device=device)[:, :count]
    return mask.masked_fill_((key > query) | (key <= query - window), torch.finfo(dtype).min)


def aligns_ends(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `causal` knows fewer queries than keys here.

    NVIDIA's flash attention aligns them at their ends, 16-bit ones from sm_80 on; AMD's has aligned them at
    their starts, so there, as on a CPU, a mask says it.
    """
    if device.type != "cuda" or torch.version.hip is not None or dtype.itemsize != 2:
        return False
    ampere = torch.cuda.get_device_capability(device) >= (8, 0)
    return ampere and head_dim % 8 == 0 and head_dim <= 256


def causal(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of the last T positions, q [S, H, T, d], to the n of keys and values [S, K, n, d] that they may see.

    torch.nn.attention.bias has a name for it, and imports torch's compiler: a second or more of every start.
    """
    if q.shape[2] == keys.shape[2]:
        return scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, keys, values, is_causal=True)[0]
    return out


def attend(q: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k / sqrt(d)) v under a mask: q [S, H, T, d] and kv [S, K, 2, n, d] to [S, T, H d].

    Fused attention knows groups of query heads or a mask, not both: under a mask key/value heads
    are the batch, and a group's query heads share one key head by a stride of zero.
    """
    keys, values = kv.unbind(2)
    if mask is None:
        return causal(q, keys, values).transpose(1, 2).flatten(2)
    lanes, heads = keys.shape[:2]
    group = q.shape[1] // heads
    q = q.unflatten(1, (heads, group)).flatten(0, 1)
    keys, values = (t.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for t in (keys, values))
    out = scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return out.unflatten(0, (lanes, heads)).permute(0, 3, 1, 2, 4).flatten(2)
