"""The training model: a Laneformer in plain torch with its lanes as a batch dimension.

Parameter names and shapes are those of a Laneformer checkpoint, so that state_dict() is the
checkpoint. With L lanes, o_l = module(norm(h_l)) of lane l, and q = delay in layers:

    blocking                  h_l += sum over lanes of o
    delayed, layers 0..q-1    h_l += sqrt(L) * o_l
    delayed, the others       h_l += o_l + sum over the other lanes of o, taken q layers earlier
"""

from dataclasses import asdict, dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kog_triton.errors import ModelError


@dataclass(frozen=True)
class Shape:
    """Sizes of the demo model; the defaults are the shipped one's."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 8
    num_heads: int = 8
    intermediate_size: int = 768
    num_lanes: int = 8
    delay: int = 2  # layers; read only when reduce is "delayed"
    reduce: str = "delayed"  # or "blocking": ordinary tensor parallelism
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.reduce not in ("delayed", "blocking"):
            raise ModelError(f"reduce is {self.reduce!r}: choose delayed or blocking")
        for name in ("num_heads", "intermediate_size"):
            if getattr(self, name) % self.num_lanes:
                raise ModelError(f"{name} {getattr(self, name)} does not divide by num_lanes")
        if self.hidden_size % (2 * self.num_heads):
            raise ModelError(f"hidden_size {self.hidden_size} gives no even head width")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def twin(self) -> "Shape":
        """An ordinary decoder of these sizes: one lane is what blocking reductions compute."""
        return Shape(**{**asdict(self), "num_lanes": 1, "reduce": "blocking"})


class Weight(nn.Module):
    """A bare parameter, so that its name in the state dict ends in `.weight`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        lanes, hidden = shape.num_lanes, shape.hidden_size
        self.head_dim = shape.head_dim
        self.wq = Weight(lanes, hidden // lanes, hidden)
        self.wk = Weight(lanes, hidden // lanes, hidden)
        self.wv = Weight(lanes, hidden // lanes, hidden)
        self.wo = Weight(lanes, hidden, hidden // lanes)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Causal attention of each lane's own heads: x and the result are [lanes, B, T, D]."""
        q, k, v = self.heads(x, rope)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.merge(mixed, x.shape)

    def heads(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: each [lanes * B, heads of a lane, T, head_dim]."""
        joined = torch.cat((self.wq.weight, self.wk.weight, self.wv.weight), dim=1)
        qkv = project(x, joined).unflatten(-1, (3, -1, self.head_dim))
        q, k, v = qkv.flatten(0, 1).permute(2, 0, 3, 1, 4)
        return rotate(q, rope), rotate(k, rope), v

    def merge(self, mixed: Tensor, shape: torch.Size) -> Tensor:
        """The output projection of mixed values, [lanes * B, heads of a lane, T, head_dim]."""
        return project(mixed.transpose(1, 2).reshape(*shape[:3], -1), self.wo.weight)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        lanes, hidden, width = shape.num_lanes, shape.hidden_size, shape.intermediate_size
        self.w1 = Weight(lanes, width // lanes, hidden)
        self.w2 = Weight(lanes, hidden, width // lanes)
        self.w3 = Weight(lanes, width // lanes, hidden)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """w2(silu(w1 x) * w3 x) in each lane; `rope` is not used."""
        joined = torch.cat((self.w1.weight, self.w3.weight), dim=1)
        gate, up = project(x, joined).chunk(2, dim=-1)
        return project(F.silu(gate) * up, self.w2.weight)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = Weight(shape.hidden_size)
        self.attention = Attention(shape)
        self.ffn_norm = Weight(shape.hidden_size)
        self.feed_forward = FeedForward(shape)


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings = Weight(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Weight(shape.hidden_size)


class Decoder(nn.Module):
    """Token ids [B, T] to logits [B, T, vocab_size]; computes in `dtype`, keeps float32 weights."""

    cosine: Tensor  # [max_positions, head_dim / 2]
    sine: Tensor

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.model = Body(shape)
        self.lm_head = Weight(shape.vocab_size, shape.hidden_size)
        cosine, sine = rope_table(shape)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        shape, eps = self.shape, self.shape.norm_eps
        rope = (self.cosine[: ids.shape[1]], self.sine[: ids.shape[1]])
        x = F.embedding(ids, self.model.tok_embeddings.weight).to(self.dtype)
        x = x.expand(shape.num_lanes, *x.shape)
        outputs: list[tuple[Tensor, Tensor]] = []  # raw module outputs of each layer
        for layer_idx, layer in enumerate(cast("list[Layer]", self.model.layers)):
            delayed = outputs[layer_idx - shape.delay] if layer_idx >= shape.delay else (None, None)
            attended = layer.attention(rms_norm(x, layer.attention_norm.weight, eps), rope)
            x = x + self.reduce(attended, delayed[0])
            fed = layer.feed_forward(rms_norm(x, layer.ffn_norm.weight, eps), rope)
            x = x + self.reduce(fed, delayed[1])
            outputs.append((attended, fed))
        x = rms_norm(x, self.model.norm.weight, eps).mean(dim=0)
        return F.linear(x, self.lm_head.weight.to(x.dtype))

    def reduce(self, output: Tensor, delayed: Tensor | None) -> Tensor:
        """What a module adds to each lane, of its raw output and that of `delay` layers earlier."""
        if self.shape.reduce == "blocking":
            return output.sum(dim=0, keepdim=True)
        if delayed is None:
            return self.shape.num_lanes**0.5 * output
        return output + (delayed.sum(dim=0, keepdim=True) - delayed)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Random weights, equal for a model and its twin: drawn whole, then cut into lanes.

        Standard deviation 0.5 / sqrt(fan in); wo and w2 also / sqrt(2 * layers), so that the
        residual stream stays near one; embeddings 0.1.
        """
        generator = torch.Generator().manual_seed(seed)
        hidden = self.shape.hidden_size
        for name, weight in self.named_parameters():
            if weight.dim() == 1:
                continue  # norm gains start at one
            if weight.dim() == 2:
                std = 0.1 if "tok_embeddings" in name else 0.5 * hidden**-0.5
                weight.copy_(std * torch.randn(weight.shape, generator=generator))
            elif weight.shape[1] == hidden and (".wo." in name or ".w2." in name):
                lanes, _, width = weight.shape
                std = 0.5 * (lanes * width * 2 * self.shape.num_layers) ** -0.5
                whole = std * torch.randn(hidden, lanes * width, generator=generator)
                weight.copy_(whole.view(hidden, lanes, width).transpose(0, 1))
            else:
                whole = torch.randn(weight.numel() // hidden, hidden, generator=generator)
                weight.copy_((0.5 * hidden**-0.5 * whole).view(weight.shape))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """Each lane's own matrix: [lanes, B, T, in] by [lanes, out, in] to [lanes, B, T, out]."""
    product = torch.bmm(x.flatten(1, 2), weight.to(x.dtype).transpose(1, 2))
    return product.view(*x.shape[:3], -1)


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * gain over the last dimension, computed in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * gain).to(x.dtype)


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2k / head_dim): [positions, head_dim / 2]."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float64), shape.rope_theta**-exponents)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of interleaved pairs (2k, 2k+1): x is [..., T, head_dim]."""
    cosine, sine = rope
    first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    rotated = (first * cosine - second * sine, first * sine + second * cosine)
    return torch.stack(rotated, dim=-1).flatten(-2).to(x.dtype)
