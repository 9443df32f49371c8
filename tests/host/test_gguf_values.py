"""What a GGUF header gives as a config.json, by value, and where its fields end: no weights are read."""

from types import SimpleNamespace

import pytest

from kog_triton.checkpoint.gguf import config as gguf
from kog_triton.errors import ModelError

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
PLAIN = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 100,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 10_000.0,
    "dtype": "float16", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip


def read(changes=(), embed="F16", stored=()):
    tensors = {"token_embd.weight": SimpleNamespace(shape=(100, 64), dtype=embed)}
    tensors |= dict.fromkeys(stored, SimpleNamespace(shape=(1,), dtype="F32"))
    fields = {name: value for name, value in (LLAMA | dict(changes)).items() if value is not None}
    return gguf._config(fields, SimpleNamespace(stored=tensors))


def of(architecture, **changes):
    fields = {n.replace("llama.", f"{architecture}."): v for n, v in LLAMA.items()}
    fields = dict.fromkeys(LLAMA) | fields | {"general.architecture": architecture}
    return read(fields | {f"{architecture}.{n.replace('__', '.')}": v for n, v in changes.items()})


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({}, {}),
        ({"llama.attention.key_length": 32}, {"head_dim": 32}),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32},
         {"head_dim": 32}),
        ({"llama.attention.head_count_kv": 2}, {"num_key_value_heads": 2}),
        ({"llama.rope.freq_base": 5e5}, {"rope_theta": 5e5}),
        ({"llama.attention.layer_norm_rms_epsilon": 0.5}, {"rms_norm_eps": 0.5}),
        ({"llama.rope.scaling.type": "none"}, {}),
        ({"llama.rope.scaling.factor": 2.0}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ({"llama.rope.scaling.type": "linear"}, {"rope_scaling": {"rope_type": "linear", "factor": 1.0}}),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
             "llama.rope.scaling.original_context_length": 64, "llama.rope.scaling.yarn_beta_fast": 16.0},
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0,
                              "original_max_position_embeddings": 64}},
        ),
        ({"tokenizer.ggml.bos_token_id": 0}, {"bos_token_id": 0}),
        ({"tokenizer.ggml.eos_token_id": 0}, {"eos_token_id": [0]}),
        ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 2}, {"eos_token_id": [2]}),
        ({"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}, {"eos_token_id": [2, 7]}),
        ({"tokenizer.ggml.eot_token_id": 7}, {"eos_token_id": [7]}),
        ({"llama.attention.sliding_window": 0, "general.type": "model"}, {}),
    ],
)  # fmt: skip
def test_a_config_by_value(fields, config):
    assert read(fields) == PLAIN | config


def test_a_window_makes_a_mistral():
    found = read({"llama.attention.sliding_window": 32})
    wanted = {n: v for n, v in PLAIN.items() if "bias" not in n}
    assert found == wanted | {"model_type": "mistral", "sliding_window": 32}
    with pytest.raises(ModelError, match=r"qwen3\.attention\.sliding_window is 32: not supported"):
        of("qwen3", attention__sliding_window=32)
    assert of("qwen3", attention__sliding_window=0)["model_type"] == "qwen3"


def test_what_tensors_say():
    assert read(embed="BF16")["dtype"] == "bfloat16" and read(embed="Q8_0")["dtype"] == "float16"
    assert read(stored=["output.weight"]) == PLAIN | {"tie_word_embeddings": False}
    biased = read(stored=["blk.0.attn_output.bias", "blk.0.ffn_down.bias"])
    assert biased == PLAIN | {"attention_bias": True, "mlp_bias": True}
    with pytest.raises(ModelError, match=r"tensor 'token_embd\.weight' is missing or no matrix"):
        gguf._config(LLAMA, SimpleNamespace(stored={}))
    vector = {"token_embd.weight": SimpleNamespace(shape=(100,), dtype="F16")}
    with pytest.raises(ModelError, match="is missing or no matrix"):
        gguf._config(LLAMA, SimpleNamespace(stored=vector))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("general.architecture", "gpt2"),
        ("general.architecture", None),
        ("general.type", "adapter"),
        ("llama.block_count", None),
        ("llama.block_count", 0),
        ("llama.context_length", None),
        ("llama.attention.head_count", 0),
        ("llama.attention.value_length", 32),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.attention.layer_norm_rms_epsilon", 1.5),
        ("llama.rope.freq_base", 1.0),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.factor", -1.0),
        ("llama.no_such_field", 1),
        ("tokenizer.ggml.bos_token_id", -1),
        ("tokenizer.ggml.eot_token_id", -1),
    ],
)
def test_a_field_that_is_not_read_is_named(field, value):
    with pytest.raises(ModelError) as error:
        read({field: value})
    assert field in str(error.value)
