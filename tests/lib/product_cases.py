"""Models whose matrices prompt.cu reads, and the rows of a stage as they are dealt out, by definition."""

import torch

from kog_triton.model.spec import DType
from tests.lib.ring_walker import spec_of

SMALL = {
    "num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "num_layers": 2, "vocab_size": 64, "dtype": DType.BF16,
}  # fmt: skip
SPECS = {  # chunks of two fragments and of three, 16 K parts and 4, padded K, shards
    "two": spec_of(hidden_size=1024, intermediate_size=2816, **SMALL),
    "three": spec_of(hidden_size=1536, intermediate_size=3000, **SMALL),
    "lanes": spec_of(hidden_size=1024, intermediate_size=2048, num_lanes=2, delay=0, **SMALL),
}


def dealt(weights, stage, layer):
    """[S, rows, cols] by definition: gate and up of one output side by side."""
    parts = [weights.load(f"layers.{layer}.{name}") for name in stage.weights]
    if stage.name == "gate_up_proj":
        return torch.stack(parts, 2).flatten(1, 2)
    return torch.cat(parts, 1)
