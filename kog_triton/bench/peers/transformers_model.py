"""A transformers model with our weights: the configuration from the spec, the tensors by its names.

All transformers peers are its subclasses.
"""

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from kog_triton.backends import WeightSource
from kog_triton.backends.device import TORCH_DTYPES
from kog_triton.bench.peers import Setting
from kog_triton.errors import ModelError
from kog_triton.model.families import sources
from kog_triton.model.spec import ModelSpec, RopeScaling

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class TransformersPeer:
    """A peer but for its name and its way to make tokens. `how` it runs is told beside the version."""

    checks_text = True
    how: str

    @staticmethod
    def absent(setting: Setting) -> str:
        family = setting.weights.spec.family
        if family not in FAMILIES:
            return f"transformers has no {family}"
        return "" if find_spec("transformers") else "not installed: pip install 'kog-triton[bench]'"

    def __init__(self, setting: Setting) -> None:
        self.version = f"transformers {version('transformers')}, {self.how}"
        self.spec = setting.wide_spec
        self._model: Any = load_model(setting.weights, setting.device)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        out: np.ndarray = self._model(ids, use_cache=False).logits[0].float().cpu().numpy()
        return out

    def memory_bytes(self) -> dict[str, int]:
        return {"weights": sum(p.nbytes for p in self._model.parameters())}

    def close(self) -> None:
        self._model = None


def config_of(spec: ModelSpec) -> Any:
    """The transformers configuration that describes the spec."""
    from transformers import AutoConfig

    fields: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_context,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "rope_parameters": _rope(spec),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if spec.family == "llama":
        fields |= {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}
    if spec.family == "qwen3":
        fields["attention_bias"] = spec.qkv_bias
    window = max(spec.windows)
    if spec.family == "mistral":
        fields["sliding_window"] = window or None
    elif window:
        kinds = ["sliding_attention" if w else "full_attention" for w in spec.windows]
        fields |= {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    return AutoConfig.for_model(spec.family, **fields)


def _rope(spec: ModelSpec) -> dict[str, Any]:
    rope = spec.rope
    out: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling is RopeScaling.NONE:
        return out
    out |= {"rope_type": rope.scaling.name.lower(), "factor": rope.factor}
    if rope.scaling is RopeScaling.LINEAR:
        return out
    out["original_max_position_embeddings"] = rope.original_context
    if rope.scaling is RopeScaling.LLAMA3:
        return out | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return out | {
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "attention_factor": rope.attention_factor,
        "truncate": rope.truncate,
    }


def load_model(weights: WeightSource, device: torch.device) -> Any:
    """The model on the device in the spec's dtype; ModelError if a tensor has no place or is left out."""
    from transformers import AutoModelForCausalLM

    spec = weights.spec
    with device:
        model = AutoModelForCausalLM.from_config(config_of(spec), dtype=TORCH_DTYPES[spec.dtype])
    model.eval()
    own = model.state_dict()
    missing = set(own)
    for name, stored in _names(spec):
        if stored not in own:
            raise ModelError(f"transformers' {spec.family} has no tensor {stored!r}")
        own[stored].copy_(weights.load(name).reshape(own[stored].shape))
        missing.discard(stored)
    if spec.tied_embeddings:
        model.tie_weights()
        missing.discard("lm_head.weight")
    if missing:
        raise ModelError(f"transformers' {spec.family} also wants {sorted(missing)[0]!r}")
    return model


def _names(spec: ModelSpec) -> list[tuple[str, str]]:
    """(canonical name, transformers' name) of every weight."""
    pairs = []
    for pattern, source in sources(spec).items():
        for layer in range(spec.num_layers if "{}" in pattern else 1):
            pairs.append((pattern.format(layer), source.names[0].format(layer)))
    return pairs
