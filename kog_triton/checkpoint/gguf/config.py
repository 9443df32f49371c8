"""A GGUF file's metadata as the config.json of the same model, so that one reader per family serves both.

Architectures llama (Llama and Mistral), qwen2 and qwen3. llama.cpp stores Llama's query and key rows in interleaved
RoPE order, the others' in half-split order, and Llama 3's RoPE scaling as a tensor of divisors.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kog_triton.checkpoint.gguf.file import Directory
from kog_triton.checkpoint.gguf.tensors import ROPE_DIVISORS, GgufTensors
from kog_triton.errors import ModelError, shown
from kog_triton.model.config import Config
from kog_triton.model.family import Source
from kog_triton.model.rope_config import MAX_CONTEXT
from kog_triton.model.spec import ModelSpec, Rope, RopeScaling
from kog_triton.schedule.rope import inverse_frequencies

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LARGEST = 1 << 31
# Fields behind ARCHITECTURE. that are read below or change nothing; with any other a file is refused
_READ = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "pooling_type",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
# with these values they change nothing
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.key_length_mla": (0,),
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "tensor_data_layout": ("Meta AI original pth",),  # the order that every llama file has
}
_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attention_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "o_proj": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
}


def gguf_config(directory: Directory, tensors: GgufTensors) -> dict[str, Any]:
    """What config.json would say; ModelError naming the field for what is missing or not supported."""
    try:
        return _config(directory.metadata, tensors)
    except ModelError as error:
        raise directory.error(str(error)) from None


def gguf_sources(spec: ModelSpec, architecture: str) -> dict[str, Source]:
    """Where the file keeps each canonical tensor of `spec.shapes`."""
    interleaved = ("q_proj", "k_proj", "q_bias", "k_bias") if architecture == "llama" else ()
    out = {}
    for pattern in spec.shapes:
        kind = pattern.rpartition(".")[2]
        prefix = "blk.{}." if "{}" in pattern else ""
        out[pattern] = Source((prefix + _NAMES[kind],), interleaved_rope=kind in interleaved)
    return out


def _config(metadata: Mapping[str, Any], tensors: GgufTensors) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"general.architecture is {shown(architecture)}: it must be one of {', '.join(ARCHITECTURES)}")
    own = Config(
        {k.partition(".")[2]: v for k, v in metadata.items() if k.startswith(f"{architecture}.")}, f"{architecture}."
    )
    for name in own.values:
        if name not in _READ:
            own.only(name, *_NEUTRAL.get(name, ()))
    Config(metadata).only("general.type", "model")
    heads = own.integer("attention.head_count", high=_LARGEST)
    hidden = own.integer("embedding_length", high=_LARGEST)
    width = own.integer("attention.key_length", high=_LARGEST, default=hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        own.only(name, width)
    window = own.integer("attention.sliding_window", low=0, high=MAX_CONTEXT, default=0)
    if window and architecture != "llama":
        raise ModelError(f"{own.label('attention.sliding_window')} is {window}: not supported")
    embed = tensors.stored.get(_NAMES["embed"])
    if embed is None or len(embed.shape) != 2:
        raise ModelError(f"tensor {_NAMES['embed']!r} is missing or no matrix")
    config = {
        "model_type": "mistral" if window else architecture,
        "num_hidden_layers": own.integer("block_count", high=_LARGEST),
        "hidden_size": hidden,
        "intermediate_size": own.integer("feed_forward_length", high=_LARGEST),
        "num_attention_heads": heads,
        "num_key_value_heads": own.integer("attention.head_count_kv", high=_LARGEST, default=heads),
        "head_dim": width,
        "vocab_size": embed.shape[0],
        "max_position_embeddings": own.integer("context_length", high=_LARGEST),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon", low=0, high=1),
        "tie_word_embeddings": _NAMES["lm_head"] not in tensors.stored,
        "rope_theta": own.number("rope.freq_base", low=1.01, high=1e15, default=10_000.0),
        # wide tensors and what is unpacked; norms may be F32
        "dtype": "bfloat16" if embed.dtype == "BF16" else "float16",
    }
    if window:
        config["sliding_window"] = window
    elif architecture == "llama":
        config["attention_bias"] = "blk.0.attn_output.bias" in tensors.stored
        config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors.stored
    scaling = _rope_scaling(own, tensors, config)
    if scaling:
        config["rope_scaling"] = scaling
    return config | _ends(Config(metadata))


def _ends(metadata: Config) -> dict[str, Any]:
    """bos_token_id and eos_token_id: of a text, and of a turn where that differs."""
    found: dict[str, Any] = {}
    bos = metadata.integer("tokenizer.ggml.bos_token_id", low=0, high=_LARGEST, default=None)
    if bos is not None:
        found["bos_token_id"] = bos
    ends = [
        metadata.integer(f"tokenizer.ggml.{name}_token_id", low=0, high=_LARGEST, default=None)
        for name in ("eos", "eot")
    ]
    eos = [i for i in dict.fromkeys(ends) if i is not None]
    if eos:
        found["eos_token_id"] = eos
    return found


def _rope_scaling(own: Config, tensors: GgufTensors, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """As config.json's rope_scaling, None without; a factor without a type is linear, as llama.cpp has it."""
    factor = own.number("rope.scaling.factor", "rope.scale_linear", low=0, high=1e6, default=0.0)
    default = "linear" if factor else "none"
    kind = own.choice("rope.scaling.type", of=("none", "linear", "yarn"), default=default)
    divisors = ROPE_DIVISORS in tensors.stored
    if kind == "none":
        return _llama3(tensors, config) if divisors else None
    if divisors:
        raise ModelError(f"{own.label('rope.scaling.type')} and {ROPE_DIVISORS} are both given")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor or 1.0}
    if kind == "yarn":
        for name in ("beta_fast", "beta_slow"):
            beta = own.number(f"rope.scaling.yarn_{name}", low=0, high=1e6, default=None)
            if beta is not None:
                scaling[name] = beta
        scaling["original_max_position_embeddings"] = own.integer(
            "rope.scaling.original_context_length", high=MAX_CONTEXT
        )
    return scaling


def _llama3(tensors: GgufTensors, config: Mapping[str, Any]) -> dict[str, Any]:
    """The llama3 scaling that gives the stored divisors; ModelError if Llama 3's own ranges do not."""
    stored, half = tensors.stored[ROPE_DIVISORS], config["head_dim"] // 2
    if stored.shape != (half,) or stored.dtype != "F32":
        raise ModelError(f"{ROPE_DIVISORS} has shape {list(stored.shape)}: it must be F32 [{half}]")
    divisors = tensors.read(ROPE_DIVISORS).numpy().astype(np.float64)
    factor, theta = float(divisors.max()), config["rope_theta"]
    if np.isfinite(divisors).all() and factor > 1:
        low, high, trained = _LLAMA3.values()
        scaled = Rope(theta, RopeScaling.LLAMA3, factor, int(trained), low, high)
        plain = inverse_frequencies(Rope(theta), 2 * half)
        if np.allclose(plain / inverse_frequencies(scaled, 2 * half), divisors, rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor} | _LLAMA3
    raise ModelError(f"{ROPE_DIVISORS} are not the divisors of Llama 3's RoPE: not supported")
