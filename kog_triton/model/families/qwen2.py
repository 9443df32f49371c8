"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and windows by layer."""

from kog_triton.model.config import Config
from kog_triton.model.families.decoder import decoder_sources, qwen_windows, read_decoder
from kog_triton.model.family import Family
from kog_triton.model.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    config.only("attention_bias", True)
    config.only("mlp_bias", False)
    return read_decoder(config, "qwen2", num_kv_heads=32, windows=qwen_windows(config), qkv_bias=True)


QWEN2 = Family("qwen2", ("qwen2",), ("Qwen2ForCausalLM",), _spec, decoder_sources)
