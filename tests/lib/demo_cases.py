"""Small decoders of the demo's family: a random one with wide logits, a trained one and what its files hold."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from kog_triton.demo.model import Decoder, Shape
from kog_triton.demo.train import Settings
from tests import DATA

LLAMA = DATA / "llama"  # trained: data/llama/train.py
TINY = Shape(
    vocab_size=61,
    hidden_size=24,
    num_layers=5,
    num_heads=6,
    intermediate_size=30,
    num_lanes=3,
    delay=2,
    max_positions=40,
)


def spread(shape: Shape, seed: int = 0) -> Decoder:
    """A random model whose logits are wide, so that an error shows."""
    model = Decoder(shape)
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0) if weight.dim() > 1 else weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def ids_of(shape: Shape, batch: int = 2, length: int = 17) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(shape.vocab_size, (batch, length), generator=generator)


SETTINGS = Settings(tokens=9 * 2 * 16, batch=2, window=16, warmup=3, seed=5)


def laneformer_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    lanes, hidden = shape.num_lanes, shape.hidden_size
    heads, width = hidden // lanes, shape.intermediate_size // lanes
    want: dict[str, tuple[int, ...]] = {
        "model.tok_embeddings.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape.vocab_size, hidden),
    }
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        want |= {f"{layer}.attention.w{n}.weight": (lanes, heads, hidden) for n in "qkv"}
        want |= {f"{layer}.feed_forward.w{n}.weight": (lanes, width, hidden) for n in "13"}
        want[f"{layer}.attention.wo.weight"] = (lanes, hidden, heads)
        want[f"{layer}.feed_forward.w2.weight"] = (lanes, hidden, width)
        want |= {f"{layer}.{n}.weight": (hidden,) for n in ("attention_norm", "ffn_norm")}
    return want


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        shard = load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in shard)
        tensors |= shard
    assert set(tensors) == set(index["weight_map"])
    return tensors
