"""Small models of every kind that peers take, and the judge of what they say."""

import numpy as np

from kog_triton.backends import BackendOptions, find_backend
from kog_triton.bench.check import Judge

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "dtype": "float32",
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32},
    },
    "yarn": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
}
PROMPT = [int(i) for i in np.random.default_rng(1).integers(0, 97, 20)]


def judge_of(weights, ids=PROMPT):
    reference = find_backend("reference")(weights, BackendOptions(max_context=64))
    return Judge(reference, ids, PROMPT, 16)
