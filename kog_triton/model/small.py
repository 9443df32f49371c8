"""A small model like a given one: its type, its heads' sizes and all its options, but few layers, columns and words.

Its kernels compile and run in seconds, so every stage and kernel is tested on it (stage_check.py).
"""

from kog_triton.model.spec import DTYPES, ModelSpec

CONTEXT, CACHED = 64, 40  # positions: that it has, and in the cache when a stage is tested
HIDDEN, COLUMNS, VOCAB = 512, 128, 1024  # columns of the MLP, a lane


def small_model(spec: ModelSpec, dtype: str = "auto", num_gpus: int = 1) -> ModelSpec:
    """Of `dtype`, or "auto": as the model. All its windows hold: the first layer has the model's shortest. Its heads
    divide over so many GPUs, if its lanes do."""
    lanes = spec.num_lanes
    kv_heads = max(lanes, num_gpus)
    layers = min(spec.num_layers, spec.delay + 2)
    window = min((w for w in spec.windows if w), default=0)
    return spec.replace(
        num_layers=layers,
        hidden_size=HIDDEN,
        intermediate_size=COLUMNS * lanes,
        num_heads=kv_heads * spec.group,
        num_kv_heads=kv_heads,
        vocab_size=VOCAB,
        max_context=CONTEXT,
        windows=(min(window, CACHED // 2), *(0,) * (layers - 1)),
        reduce_attention=spec.reduce_attention[:layers],
        reduce_mlp=spec.reduce_mlp[:layers],
        dtype=spec.dtype if dtype == "auto" else DTYPES[dtype],
        narrow=(),
    )
