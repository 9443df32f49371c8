"""Published models by name, to plan and measure without a checkpoint (`--shape llama-3.2-1b`).

Each is what its config.json says, read by the same family code as a checkpoint's.
"""

from typing import Any

from kog_triton.errors import ModelError
from kog_triton.model.families import read_spec
from kog_triton.model.spec import ModelSpec
from kog_triton.model.weight_format import WeightFormat

_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
Config = dict[str, Any]


def _dense(model_type: str, *sizes: int, tied: bool, **more: Any) -> Config:
    """A dense model's config, its sizes in the order of _SIZES."""
    fields = dict(zip(_SIZES, sizes, strict=True))
    ties = {"tie_word_embeddings": tied, "dtype": "bfloat16"}
    return {"model_type": model_type, **fields, **ties, **more}


def _llama(*sizes: int, tied: bool, theta: float, factor: float = 0, **more: Any) -> Config:
    if factor:
        more["rope_scaling"] = {**_LLAMA3, "factor": factor}
    return _dense("llama", *sizes, tied=tied, rms_norm_eps=1e-5, rope_theta=theta, **more)


def _mistral(*sizes: int, **own: Any) -> Config:
    more = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None, **own}
    return _dense("mistral", *sizes, tied=False, **more)


def _qwen2(*sizes: int, tied: bool) -> Config:
    return _dense("qwen2", *sizes, tied=tied, rms_norm_eps=1e-6, rope_theta=1e6)


def _qwen3(*sizes: int, tied: bool) -> Config:
    more = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128}
    return _dense("qwen3", *sizes, tied=tied, **more)


# fmt: off
SHAPES: dict[str, Config] = {
    "llama-3.2-1b": _llama(
        16, 2048, 8192, 32, 8, 128256, 131072, tied=True, theta=5e5, factor=32.0, head_dim=64
    ),
    "llama-3.2-3b": _llama(
        28, 3072, 8192, 24, 8, 128256, 131072, tied=True, theta=5e5, factor=32.0, head_dim=128
    ),
    "llama-3.1-8b": _llama(
        32, 4096, 14336, 32, 8, 128256, 131072, tied=False, theta=5e5, factor=8.0
    ),
    "llama-3.3-70b": _llama(
        80, 8192, 28672, 64, 8, 128256, 131072, tied=False, theta=5e5, factor=8.0
    ),
    # Its weights are float16, as its config.json says.
    "llama-2-7b": _llama(
        32, 4096, 11008, 32, 32, 32000, 4096, tied=False, theta=1e4
    ) | {"dtype": "float16"},
    "tinyllama-1.1b": _llama(22, 2048, 5632, 32, 4, 32000, 2048, tied=False, theta=1e4),
    "smollm2-135m": _llama(30, 576, 1536, 9, 3, 49152, 8192, tied=True, theta=1e5),
    "smollm2-360m": _llama(32, 960, 2560, 15, 5, 49152, 8192, tied=True, theta=1e5),
    "smollm2-1.7b": _llama(24, 2048, 8192, 32, 32, 49152, 8192, tied=True, theta=1.3e5),
    "mistral-7b": _mistral(32, 4096, 14336, 32, 8, 32768, 32768),
    "mistral-large-123b": _mistral(88, 12288, 28672, 96, 8, 32768, 131072, head_dim=128),
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2, 151936, 32768, tied=True),
    "qwen2.5-coder-1.5b": _qwen2(28, 1536, 8960, 12, 2, 151936, 32768, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 11008, 16, 2, 151936, 32768, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 18944, 28, 4, 152064, 32768, tied=False),
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, 8, 151936, 40960, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, 8, 151936, 40960, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, 8, 151936, 40960, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, 8, 151936, 40960, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 17408, 40, 8, 151936, 40960, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 25600, 64, 8, 151936, 40960, tied=False),
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
}
# fmt: on


def named_shape(name: str) -> ModelSpec:
    """The spec of a published model; ModelError with the known names if there is none."""
    config = SHAPES.get(name.lower())
    if config is None:
        raise ModelError(f"no shape is named {name!r}: have {', '.join(sorted(SHAPES))}")
    return read_spec(config, file=f"shape {name}")


def with_format(spec: ModelSpec, how: WeightFormat) -> ModelSpec:
    """The model with its layers' matrices in a format; embedding, head, norms and biases stay as they are.

    ModelError for groups that do not divide the columns.
    """
    names = []
    for pattern, shape in spec.shapes.items():
        if not pattern.endswith("_proj"):
            continue
        if reason := how.undivided(shape[-1]):
            raise ModelError(f"{pattern.format(0)}: {reason}: choose another format")
        names += [(pattern.format(layer), how) for layer in range(spec.num_layers)]
    return spec.replace(narrow=tuple(names))
