"""Sizes that people run: all that have a name and one that is wider, whole or a few layers of them."""

from kog_triton.model.shapes import SHAPES, named_shape
from kog_triton.model.spec import ModelSpec


def real_shape(name: str, num_layers: int = 0) -> ModelSpec:
    """A named shape or "qwen2.5-14b", with so many layers; 0: all that it has, and 28 of the latter."""
    if name == "qwen2.5-14b":
        wide = {"hidden_size": 5120, "intermediate_size": 13824, "num_heads": 40, "num_kv_heads": 8}
        spec = named_shape("qwen2.5-7b").replace(**wide)
    else:
        spec = named_shape(name)
    count = num_layers or spec.num_layers
    return spec.replace(
        num_layers=count,
        windows=spec.windows[:count],
        reduce_attention=spec.reduce_attention[:count],
        reduce_mlp=spec.reduce_mlp[:count],
    )


REAL = (*SHAPES, "qwen2.5-14b")
