"""A decoder as data: what a checkpoint says and what the schedule, the packing and the kernels need.

A model is a stack of identical layers (attention, then a gated MLP) over one residual stream per
*lane*. A plain model has one lane; a Laneformer has several, which exchange their module outputs late
or never. What differs from layer to layer (window, how outputs are reduced) is a tuple indexed by
layer. No torch, no numpy, no device.

RoPE has one layout here, the half-split one (element i turns with i + head_dim / 2): a family whose
checkpoint turns interleaved pairs permutes the query and key rows when it loads, which leaves every
score as it was.
"""

import dataclasses
import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from kog_triton.errors import ModelError
from kog_triton.model.weight_format import WeightFormat


class DType(IntEnum):
    """How a tensor is stored. The values are part of the generated header."""

    F32 = 0
    BF16 = 1
    F16 = 2

    @property
    def bytes(self) -> int:
        return 4 if self is DType.F32 else 2


DTYPES = {"fp32": DType.F32, "bf16": DType.BF16, "fp16": DType.F16}  # as options name them


class Reduce(IntEnum):
    """How the outputs of one module, one per lane, join the residual streams."""

    NOW = 0  # x_l += sum over lanes of o: ordinary tensor parallelism, or a single lane
    OWN = 1  # x_l += sqrt(lanes) * o_l: nothing is exchanged
    DELAYED = 2  # x_l += o_l + sum over other lanes of their output `delay` layers ago


class Head(IntEnum):
    """How the lanes' residual streams become logits."""

    MEAN = 0  # norm each lane, average, lm_head [vocab, hidden]; a plain model is the one-lane case
    SUM_THEN_NORM = 1  # add the lanes, norm, lm_head [vocab, hidden]
    VOCAB_PARALLEL = 2  # norm each lane; lane l scores its own rows: lm_head [lanes, vocab / lanes, hidden]
    CONCAT = 3  # norm each lane, concatenate: lm_head [vocab, lanes * hidden]


class RopeScaling(IntEnum):
    NONE = 0
    LINEAR = 1
    LLAMA3 = 2
    YARN = 3


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding; `schedule.rope_table` turns it into numbers. Unused fields stay at their defaults."""

    theta: float = 10_000.0
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_context: int = 0  # positions the model was first trained on (LLAMA3, YARN)
    low_freq_factor: float = 1.0  # LLAMA3
    high_freq_factor: float = 4.0  # LLAMA3
    beta_fast: float = 32.0  # YARN
    beta_slow: float = 1.0  # YARN
    attention_factor: float = 1.0  # YARN: multiplies cos and sin
    truncate: bool = True  # YARN: whether the correction range is rounded to whole dimensions


@dataclass(frozen=True)
class ModelSpec:
    """One decoder. Counts are totals over all lanes; `windows` and the two `reduce` tuples have one entry a layer."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: Rope
    windows: tuple[int, ...]  # keys a layer sees, itself included; 0 = all of them
    reduce_attention: tuple[Reduce, ...]
    reduce_mlp: tuple[Reduce, ...]
    dtype: DType = DType.BF16
    kv_dtype: DType | None = None  # of the KV cache; None = as the weights
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    num_lanes: int = 1
    delay: int = 0  # layers between an output and its arrival at the other lanes
    head: Head = Head.MEAN
    lane_norms: bool = False  # one norm gain a lane instead of one for all
    # Weights that are stored narrow, by canonical name ("layers.3.q_proj"); the others are `dtype`.
    narrow: tuple[tuple[str, WeightFormat], ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_context",
            "num_lanes",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim {self.head_dim} is odd: RoPE turns pairs of elements")
        for name in ("windows", "reduce_attention", "reduce_mlp"):
            if len(getattr(self, name)) != self.num_layers:
                raise ModelError(f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers")
        for name in ("num_heads", "num_kv_heads", "intermediate_size"):
            if getattr(self, name) % self.num_lanes:
                raise ModelError(f"{name} {getattr(self, name)} does not divide over {self.num_lanes} lanes")
        if self.head is Head.VOCAB_PARALLEL and self.vocab_size % self.num_lanes:
            raise ModelError(f"vocab_size {self.vocab_size} does not divide over {self.num_lanes} lanes")
        if Reduce.DELAYED in self.reduce_attention + self.reduce_mlp and self.delay < 1:
            raise ModelError("a DELAYED reduction needs a delay of at least one layer")
        for name in ("reduce_attention", "reduce_mlp"):
            if Reduce.DELAYED in getattr(self, name)[: self.delay]:
                layer = getattr(self, name).index(Reduce.DELAYED)
                raise ModelError(f"{name} is DELAYED in layer {layer}: nothing was written {self.delay} layers before")

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def lane_heads(self) -> int:
        return self.num_heads // self.num_lanes

    @property
    def lane_kv_heads(self) -> int:
        return self.num_kv_heads // self.num_lanes

    @property
    def lane_intermediate_size(self) -> int:
        return self.intermediate_size // self.num_lanes

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by its canonical name, with its shape; `{}` stands for the layer.

        Matrices are [lanes, rows, cols] so that one rule covers plain models and lanes; norm gains are
        [lanes or 1, hidden]. A tied model has no lm_head of its own.
        """
        lanes, d, hidden = self.num_lanes, self.head_dim, self.hidden_size
        gains = (lanes if self.lane_norms else 1, hidden)
        q, kv, ffn = self.lane_heads * d, self.lane_kv_heads * d, self.lane_intermediate_size
        out: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)}
        layer: dict[str, tuple[int, ...]] = {
            "attention_norm": gains,
            "q_proj": (lanes, q, hidden),
            "k_proj": (lanes, kv, hidden),
            "v_proj": (lanes, kv, hidden),
            "o_proj": (lanes, hidden, q),
            "mlp_norm": gains,
            "gate_proj": (lanes, ffn, hidden),
            "up_proj": (lanes, ffn, hidden),
            "down_proj": (lanes, hidden, ffn),
        }
        if self.qkv_bias:
            layer |= {"q_bias": (lanes, q), "k_bias": (lanes, kv), "v_bias": (lanes, kv)}
        if self.o_bias:
            layer |= {"o_bias": (lanes, hidden)}
        if self.mlp_bias:
            layer |= {"gate_bias": (lanes, ffn), "up_bias": (lanes, ffn), "down_bias": (lanes, hidden)}
        if self.qk_norm:
            layer |= {"q_norm": (d,), "k_norm": (d,)}
        out |= {f"layers.{{}}.{name}": shape for name, shape in layer.items()}
        out["norm"] = gains
        if not self.tied_embeddings:
            out["lm_head"] = {
                Head.VOCAB_PARALLEL: (lanes, self.vocab_size // lanes, hidden),
                Head.CONCAT: (self.vocab_size, lanes * hidden),
            }.get(self.head, (self.vocab_size, hidden))
        return out

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) * (self.num_layers if "{}" in name else 1) for name, shape in self.shapes.items())

    @cached_property
    def bytes_per_token(self) -> int:
        """Weight bytes that one decode step must read: every matrix once, one row of the embedding."""
        skipped = 0 if self.tied_embeddings else (self.vocab_size - 1) * self.hidden_size
        total = (self.num_parameters - skipped) * self.dtype.bytes
        for name, how in self.narrow:
            *lanes, rows, cols = self.shapes[pattern_of(name)]
            if name == "embed" and not self.tied_embeddings:
                rows = 1
            saved = rows * cols * self.dtype.bytes - how.bytes(rows, cols)
            total -= math.prod(lanes) * saved
        return total

    @property
    def narrow_formats(self) -> str:
        """The formats of narrow weights, for people; "" if there are none."""
        return ", ".join(dict.fromkeys(how.name for _, how in self.narrow))

    def weight_bytes(self, name: str) -> int:
        """Bytes of one weight by its canonical name, as it is stored."""
        shape, how = self.shapes[pattern_of(name)], dict(self.narrow).get(name)
        if how is None:
            return math.prod(shape) * self.dtype.bytes
        return math.prod(shape[:-2]) * how.bytes(*shape[-2:])

    @property
    def _kv_row_bytes(self) -> int:
        """A position's keys and values in one layer."""
        dtype = self.dtype if self.kv_dtype is None else self.kv_dtype
        return 2 * self.num_kv_heads * self.head_dim * dtype.bytes

    @property
    def kv_bytes_per_position(self) -> int:
        return self.num_layers * self._kv_row_bytes

    def kv_bytes_read(self, position: int) -> int:
        """KV-cache bytes that the step at `position` reads, windows counted."""
        seen = sum(min(position + 1, window or position + 1) for window in self.windows)
        return seen * self._kv_row_bytes

    def decode_bytes(self, prompt_tokens: int, tokens: int) -> int:
        """Weight and KV bytes of one decode step at the mean depth of the steps that are timed.

        The steps after the first token are at positions prompt .. prompt + tokens - 2.
        """
        mean = prompt_tokens + max(tokens - 2, 0) / 2
        return self.bytes_per_token + self.kv_bytes_read(int(mean))

    def replace(self, **changes: object) -> "ModelSpec":
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def pattern_of(name: str) -> str:
    """The key of `ModelSpec.shapes` for a canonical name: "layers.{}.q_proj" of "layers.3.q_proj"."""
    first, _, rest = name.partition(".")
    return f"layers.{{}}.{rest.partition('.')[2]}" if first == "layers" else name
