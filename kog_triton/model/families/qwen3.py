"""Qwen3, dense: Llama with an RMS norm over every query and key head, and its own head width."""

from kog_triton.model.config import Config
from kog_triton.model.families.decoder import decoder_sources, qwen_windows, read_decoder
from kog_triton.model.family import Family
from kog_triton.model.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    config.only("mlp_bias", False)
    attention_bias = config.boolean("attention_bias", default=False)
    return read_decoder(
        config,
        "qwen3",
        num_kv_heads=32,
        head_dim=128,
        windows=qwen_windows(config),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )


QWEN3 = Family("qwen3", ("qwen3",), ("Qwen3ForCausalLM",), _spec, decoder_sources)
