"""What a pass over a prompt takes of the weights: matrices from where a backend's kernel reads them, and the rest.

Shapes here and in the pass: S lanes, T tokens, H query heads and K key/value heads of a lane,
F columns of a lane's down_proj, d head_dim. On several GPUs S are the shards of one of them (schedule.py): lanes, or
its part of a plain model's heads and FFN. Rows are those of the stages, as they are dealt out:

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
from kog_triton.schedule.schedule import Schedule
from kog_triton.schedule.shards import shard_bias

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
    weights: WeightSource, schedule: Schedule, layer: int, device: torch.device, dtype: torch.dtype, rank: int = 0
) -> LayerWeights:
    """What a rank's shards have."""
    spec, each = schedule.spec, schedule.shards_per_rank
    own = slice(rank * each, (rank + 1) * each)

    def get(name: str, to: torch.dtype = dtype) -> Tensor:
        tensor: Tensor = weights.load(f"layers.{layer}.{name}")
        return tensor.to(device, to)

    def norm(name: str) -> Tensor:
        gains = get(name, torch.float32)[:, None]
        return gains[own] if len(gains) > 1 else gains

    def biases(stage: str, *names: str) -> list[Tensor]:
        return [shard_bias(schedule, schedule.stage(stage), get(n))[own] for n in names]

    def head_norms() -> Tensor:  # a row a head: the queries' gain, then the keys'
        q, k = (get(f"{name}_norm", torch.float32) for name in "qk")
        heads, kv_heads = schedule.shard_heads, schedule.shard_kv_heads
        return torch.cat([q.expand(heads, -1), k.expand(kv_heads, -1)])

    def woven() -> Tensor:
        return torch.stack(biases("gate_up_proj", "gate_bias", "up_bias"), -1).flatten(1)

    return LayerWeights(
        attention_norm=norm("attention_norm"),
        qkv_bias=torch.cat(biases("qkv_proj", "q_bias", "k_bias", "v_bias"), 1) if spec.qkv_bias else None,
        qk_norm=head_norms() if spec.qk_norm else None,
        o_bias=biases("o_proj", "o_bias")[0] if spec.o_bias else None,
        mlp_norm=norm("mlp_norm"),
        gate_up_bias=woven() if spec.mlp_bias else None,
        down_bias=biases("down_proj", "down_bias")[0] if spec.mlp_bias else None,
    )
