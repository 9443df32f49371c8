"""What a pass over a prompt takes of the weights: matrices from where a backend's kernel reads them, and the rest.

Shapes here and in the pass: S lanes, T tokens, H query heads and K key/value heads of a lane,
F columns of a lane's down_proj, d head_dim. Rows are those of the stages (schedule.py), as they are dealt out:

    qkv_proj      q | k | v, [S, (H + 2 K) d, hidden]
    gate_up_proj  gate and up of one output side by side, [S, 2 F, hidden]
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch.nn.functional import linear

from kog_triton.backends import WeightSource
from kog_triton.model.spec import ModelSpec

Tensor = torch.Tensor


class Matrices(Protocol):
    """The layers' matrices, of a backend that holds them in the order of its kernel."""

    def product(self, layer: int, stage: str, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [S, T, cols] times the stage's [S, rows, cols], plus bias [S, rows]: [S, T, rows], in the order of the
        current stream."""
        ...

    @property
    def nbytes(self) -> int:
        """Held beside what the kernel reads."""
        ...


class Unpacked(ABC):
    """Matrices that are laid out for torch before they are multiplied."""

    @property
    def nbytes(self) -> int:
        """Held beside what the kernel reads."""
        return 0

    @abstractmethod
    def unpack(self, layer: int, stage: str) -> Tensor:
        """[S, rows, cols] on the backend's device, in the order of the current stream; not to be kept or written to."""

    def product(self, layer: int, stage: str, x: Tensor, bias: Tensor | None) -> Tensor:
        w = self.unpack(layer, stage)
        if len(w) == 1:
            return linear(x[0], w[0], None if bias is None else bias[0])[None]
        return torch.bmm(x, w.mT) if bias is None else torch.baddbmm(bias[:, None], x, w.mT)


@dataclass(frozen=True)
class LayerWeights:
    """What a layer has beside its matrices: biases in the pass's dtype, norm gains float32."""

    attention_norm: Tensor  # [S or 1, 1, hidden]
    qkv_bias: Tensor | None  # [S, (H + 2 K) d]
    qk_norm: Tensor | None  # [H + K, d]
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    def tensors(self) -> Iterator[Tensor]:
        parts = (getattr(self, f.name) for f in fields(self))
        return (t for t in parts if t is not None)


def load_layer(
    weights: WeightSource, spec: ModelSpec, layer: int, device: torch.device, dtype: torch.dtype
) -> LayerWeights:
    def get(name: str, to: torch.dtype = dtype) -> Tensor:
        tensor: Tensor = weights.load(f"layers.{layer}.{name}")
        return tensor.to(device, to)

    def head_norms() -> Tensor:  # a row a head: the queries' gain, then the keys'
        q, k = (get(f"{name}_norm", torch.float32) for name in "qk")
        return torch.cat([q.expand(spec.lane_heads, -1), k.expand(spec.lane_kv_heads, -1)])

    def woven() -> Tensor:
        return torch.stack([get("gate_bias"), get("up_bias")], -1).flatten(1)

    return LayerWeights(
        attention_norm=get("attention_norm", torch.float32)[:, None],
        qkv_bias=torch.cat([get(f"{n}_bias") for n in "qkv"], 1) if spec.qkv_bias else None,
        qk_norm=head_norms() if spec.qk_norm else None,
        o_bias=get("o_bias") if spec.o_bias else None,
        mlp_norm=get("mlp_norm", torch.float32)[:, None],
        gate_up_bias=woven() if spec.mlp_bias else None,
        down_bias=get("down_bias") if spec.mlp_bias else None,
    )
