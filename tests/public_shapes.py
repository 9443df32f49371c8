"""Dense models that people run, as their config.json says: what a lowering makes of real sizes."""

from kog_triton.model.families import read_spec

QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 128}
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5}
# family, then hidden_size, intermediate_size, layers, query heads, key/value heads, vocab_size
SHAPES = {
    "qwen2.5-0.5b": (QWEN2, 896, 4864, 24, 14, 2, 151936),
    "qwen2.5-1.5b": (QWEN2, 1536, 8960, 28, 12, 2, 151936),
    "qwen2.5-3b": (QWEN2, 2048, 11008, 36, 16, 2, 151936),
    "qwen2.5-7b": (QWEN2, 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": (QWEN2, 5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": (QWEN2, 5120, 27648, 64, 40, 8, 152064),
    "qwen3-0.6b": (QWEN3, 1024, 3072, 28, 16, 8, 151936),
    "qwen3-1.7b": (QWEN3, 2048, 6144, 28, 16, 8, 151936),
    "qwen3-4b": (QWEN3, 2560, 9728, 36, 32, 8, 151936),
    "qwen3-8b": (QWEN3, 4096, 12288, 36, 32, 8, 151936),
    "qwen3-14b": (QWEN3, 5120, 17408, 40, 40, 8, 151936),
    "qwen3-32b": (QWEN3, 5120, 25600, 64, 64, 8, 151936),
    "llama-3.2-1b": (LLAMA, 2048, 8192, 16, 32, 8, 128256),
    "llama-3.2-3b": (LLAMA, 3072, 8192, 28, 24, 8, 128256),
    "llama-3.1-8b": (LLAMA, 4096, 14336, 32, 32, 8, 128256),
    "llama-2-7b": (LLAMA, 4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": (LLAMA, 5120, 13824, 40, 40, 40, 32000),
    "tinyllama-1.1b": (LLAMA, 2048, 5632, 22, 32, 4, 32000),
    "smollm2-135m": (LLAMA, 576, 1536, 30, 9, 3, 49152),
    "smollm2-360m": (LLAMA, 960, 2560, 32, 15, 5, 49152),
    "smollm2-1.7b": (LLAMA, 2048, 8192, 24, 32, 32, 49152),
    "mistral-7b": (LLAMA | {"model_type": "mistral"}, 4096, 14336, 32, 32, 8, 32768),
}


def public_spec(name, **changes):
    """The spec of one of SHAPES, in bf16."""
    family, hidden, intermediate, layers, heads, kv_heads, vocab = SHAPES[name]
    config = family | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": hidden < 3000,
        "dtype": "bfloat16",
    }
    return read_spec(config | changes, file=name)
