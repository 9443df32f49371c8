"""Llama 2 and 3, what shares their code (TinyLlama, SmolLM2), and Mistral with its window."""

from kog_triton.errors import ModelError
from kog_triton.model.config import Config
from kog_triton.model.families.decoder import decoder_sources, layer_kinds, num_layers, read_decoder
from kog_triton.model.family import Family
from kog_triton.model.rope_config import MAX_CONTEXT
from kog_triton.model.spec import ModelSpec


def _llama(config: Config) -> ModelSpec:
    config.only("sliding_window")
    if "sliding_attention" in (layer_kinds(config) or ()):
        raise ModelError("layer_types has 'sliding_attention': Llama has no sliding window")
    attention_bias = config.boolean("attention_bias", default=False)
    return read_decoder(
        config,
        "llama",
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", default=False),
    )


def _mistral(config: Config) -> ModelSpec:
    """Every layer slides unless `sliding_window` is null; left out, it means 4096."""
    config.only("attention_bias", False)
    config.only("mlp_bias", False)
    window = config.integer("sliding_window", high=MAX_CONTEXT, default=0)
    if "sliding_window" not in config.values:
        window = 4096
    kind = "sliding_attention" if window else "full_attention"
    if any(k != kind for k in layer_kinds(config) or ()):
        raise ModelError(f"layer_types disagrees with sliding_window: every layer must be {kind!r}")
    return read_decoder(config, "mistral", num_kv_heads=8, windows=(window,) * num_layers(config))


LLAMA = Family("llama", ("llama",), ("LlamaForCausalLM",), _llama, decoder_sources)
MISTRAL = Family("mistral", ("mistral",), ("MistralForCausalLM",), _mistral, decoder_sources)
