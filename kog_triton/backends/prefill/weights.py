"""Layer weights as torch's matrix products want them: a second copy, beside the kernel's own.

    qkv       q | k | v in one matrix, [lanes, (H + 2 K) d, hidden]
    gate_up   gate | up in one matrix, [lanes, 2 F, hidden]

Rows of query and key heads are reordered so that the two elements which RoPE rotates together are
neighbors: (0, d/2, 1, d/2 + 1, ...). A head is then d / 2 complex numbers, a rotation one product.

Shapes here and in the pass: S lanes, T tokens, H query heads and K key/value heads of a lane,
F columns of a lane's down_proj, d head_dim.
"""

from dataclasses import dataclass, fields

import torch

from kog_triton.backends import WeightSource
from kog_triton.model.spec import ModelSpec

Tensor = torch.Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer; matrices and biases in the pass's dtype, norm gains float32."""

    attention_norm: Tensor  # [S or 1, 1, hidden]
    qkv: Tensor  # [S, (H + 2 K) d, hidden], query and key rows paired
    qkv_bias: Tensor | None  # [S, (H + 2 K) d], likewise
    qk_norm: Tensor | None  # [H + K, d], likewise
    o: Tensor  # [S, hidden, H d]
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # [S, 2 F, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [S, hidden, F]
    down_bias: Tensor | None

    @property
    def nbytes(self) -> int:
        parts = (getattr(self, f.name) for f in fields(self))
        return sum(t.nbytes for t in parts if t is not None)


def load_layer(
    weights: WeightSource, spec: ModelSpec, layer: int, device: torch.device, dtype: torch.dtype
) -> LayerWeights:
    d = spec.head_dim

    def get(name: str, to: torch.dtype = dtype) -> Tensor:
        tensor: Tensor = weights.load(f"layers.{layer}.{name}")
        return tensor.to(device, to)

    def fused(suffix: str) -> Tensor:  # q | k | v, along rows
        q, k, v = (get(f"{name}_{suffix}") for name in "qkv")
        return torch.cat([paired(q, 1, d), paired(k, 1, d), v], 1)

    def woven_norm() -> Tensor:  # a row a head: the queries' gain, then the keys'
        q, k = (paired(get(f"{name}_norm", torch.float32), 0, d) for name in "qk")
        return torch.cat([q.expand(spec.lane_heads, -1), k.expand(spec.lane_kv_heads, -1)])

    biased = spec.mlp_bias
    return LayerWeights(
        attention_norm=get("attention_norm", torch.float32)[:, None],
        qkv=fused("proj"),
        qkv_bias=fused("bias") if spec.qkv_bias else None,
        qk_norm=woven_norm() if spec.qk_norm else None,
        o=get("o_proj"),
        o_bias=get("o_bias") if spec.o_bias else None,
        mlp_norm=get("mlp_norm", torch.float32)[:, None],
        gate_up=torch.cat([get("gate_proj"), get("up_proj")], 1),
        gate_up_bias=torch.cat([get("gate_bias"), get("up_bias")], 1) if biased else None,
        down=get("down_proj"),
        down_bias=get("down_bias") if biased else None,
    )


def paired(t: Tensor, dim: int, head_dim: int) -> Tensor:
    """Heads' elements along `dim`, those that rotate together made neighbors."""
    halves = t.unflatten(dim, (-1, 2, head_dim // 2))
    return halves.transpose(dim + 1, dim + 2).flatten(dim, dim + 2)
