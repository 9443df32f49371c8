"""Published models by name, to plan and measure without a checkpoint (`--shape llama-3.2-1b`).

Each is what its config.json says, read by the same family code as a checkpoint's.
"""

from typing import Any

from kog_triton.errors import ModelError
from kog_triton.model.families import read_spec
from kog_triton.model.spec import ModelSpec

_QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "dtype": "bfloat16"}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    # Public descriptions leave three fields open: no early communication and the "replicate" head
    # are assumed, theta is the training code's default. None of them changes the bytes that a token
    # costs.
    "laneformer-2b": {
        "model_type": "laneformer",
        "num_hidden_layers": 15,
        "hidden_size": 3072,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "num_lanes": 8,
        "broadcast_delay": 2,
        "use_early_comm": False,
        "lm_head_type": "replicate",
        "sliding_window": 2048,
        "sliding_window_n_layers": 10,
        "norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    },
    "qwen3-0.6b": _QWEN
    | {
        "model_type": "qwen3",
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "qwen2.5-coder-1.5b": _QWEN
    | {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN
    | {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}


def named_shape(name: str) -> ModelSpec:
    """The spec of a published model; ModelError with the known names if there is none."""
    config = SHAPES.get(name.lower())
    if config is None:
        raise ModelError(f"no shape is named {name!r}: have {', '.join(sorted(SHAPES))}")
    return read_spec(config, file=f"shape {name}")
