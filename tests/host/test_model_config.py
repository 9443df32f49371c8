"""Reading config.json: what it means, and what is refused, by name, in one line."""

import pytest
import transformers

from kog_triton.errors import ModelError
from kog_triton.model.families import find_family, read_spec
from kog_triton.model.families.unread import unread_fields
from kog_triton.model.shapes import SHAPES, named_shape
from kog_triton.model.spec import Head, Reduce, RopeScaling
from tests.lib import tiny


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "16"},
        {"hidden_size": 16.0},
        {"hidden_size": True},
        {"hidden_size": 0},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**5000},
        {"vocab_size": None},
        {"num_key_value_heads": 3},
        {"head_dim": 5},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": float("inf")},
        {"hidden_act": "gelu"},
        {"rope_theta": -1},
        {"rope_theta": [1]},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
        {"rope_scaling": {"rope_type": "longrope"}},
        {"rope_scaling": {"rope_type": "linear"}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 2}},
        {"rope_scaling": ["llama3"]},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {"rope_interleave": True},
        {"rope_interleaved": True},
        {"hidden_activation": "gelu"},
        {"swiglu_limit": 7.0},
        {"alibi": True},
        {"logit_scale": 0.06},
        {"partial_rotary_factor": 0.5},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_local_experts": 8},
        {"moe_intermediate_size": 128},
        {"final_logit_softcapping": 30.0},
        {"dtype": "float8_e4m3fn"},
        {"tie_word_embeddings": "yes"},
        {"attention_bias": 1},
        {"sliding_window": 8},
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "linear_attention"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "mixtral"},
        {"model_type": ["llama"]},
    ],
    ids=lambda c: (
        f"{next(iter(c))}={str(next(iter(c.values())))[:40]}" if c != {"num_hidden_layers": 10**5000} else "huge"
    ),
)
def test_config_is_refused_by_name(change):
    with pytest.raises(ModelError) as caught:
        read_spec(tiny.LLAMA | change, "here/config.json")
    message = str(caught.value)
    assert message.startswith("here/config.json: ") and "\n" not in message and len(message) < 400
    (name, value), *_ = change.items()
    # A combination is refused by the spec, in its words; a nested field may be named instead.
    named = {name, name.replace("num_key_value", "num_kv"), *(value if isinstance(value, dict) else ())}
    assert any(word in message for word in named)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_configurations_have_besides_is_known(kind):
    made = getattr(transformers, f"{kind}Config")(torch_dtype="bfloat16").to_dict()
    assert unread_fields(made | {"architectures": None}) == ()


def test_a_field_that_nothing_reads_is_named():
    # What SmolLM2's has, which is said to be a Llama's.
    smol = {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1}
    assert unread_fields(tiny.LLAMA | smol) == ()
    config = tiny.LLAMA | {"layer_norm_eps": 0.01, "foo_bar": "x" * 500, "baz": None, "qux": False}
    first, second, third = unread_fields(config)
    assert first == "config.json: layer_norm_eps 0.01 is ignored: no such field is known"
    assert second.startswith("config.json: foo_bar 'xxx") and len(second) < 300
    assert third == "config.json: qux False is ignored: no such field is known"


@pytest.mark.parametrize(
    ("family", "change", "word"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("qwen2", {"attention_bias": False}, "attention_bias"),
        ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window"),
        ("qwen3", {"num_experts": 4}, "num_experts"),
        ("laneformer", {"num_lanes": 3}, "lanes"),
        ("laneformer", {"broadcast_delay": 0}, "broadcast_delay"),
        ("laneformer", {"lm_head_type": "mixed"}, "lm_head_type"),
        ("laneformer", {"lm_head_type": "lane", "pre_norm_lane_agg": True}, "pre_norm_lane_agg"),
        ("laneformer", {"lm_head_type": "lane", "tie_word_embeddings": True}, "tie_word"),
        ("laneformer", {"sliding_window_n_layers": 6}, "sliding_window_n_layers"),
        ("laneformer", {"unclamped_layers": [5]}, "unclamped_layers"),
        ("laneformer", {"comm_dtype": "fp8"}, "comm_dtype"),
        ("laneformer", {"lm_head_type": "vocab_parallel", "vocab_size": 331}, "vocab_size"),
    ],
)
def test_family_refuses_by_name(family, change, word):
    config = tiny.laneformer_config() if family == "laneformer" else tiny.LLAMA
    config = config | {"model_type": family, "architectures": None} | change
    with pytest.raises(ModelError, match=word):
        read_spec(config)


@pytest.mark.parametrize("family", ["llama", "laneformer"])
@pytest.mark.parametrize("end", ["\x1b[2J", "\ud800", "x" * 5000, "\n"])
def test_a_name_that_a_file_made_up_is_one_short_line(family, end):
    """Found by 100,000 cases of the fuzzer."""
    config = tiny.laneformer_config() if family == "laneformer" else tiny.LLAMA
    name = ("lane_" if family == "laneformer" else "moe_") + end
    with pytest.raises(ModelError) as caught:
        read_spec(config | {name: True}, "config.json")
    message = str(caught.value)
    assert name[:4] in message and message.isprintable() and len(message) < 300


def test_family_by_architecture_alone():
    config = {k: v for k, v in tiny.LLAMA.items() if k != "model_type"}
    assert find_family(config).name == "llama"
    with pytest.raises(ModelError, match="no model_type"):
        find_family({})


def test_laneformer_config_details():
    scaling = {
        "scaling_factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    spec = read_spec(tiny.laneformer_config(rope_scaling_args=scaling, use_mlp_comm=False))
    assert (spec.rope.scaling, spec.rope.factor) == (RopeScaling.LLAMA3, 4.0)
    assert spec.reduce_attention == (Reduce.NOW,) * 2 + (Reduce.DELAYED,) * 3
    assert spec.reduce_mlp == (Reduce.NOW,) * 2 + (Reduce.OWN,) * 3
    one = read_spec(tiny.laneformer_config(num_lanes=1, use_comm=False, lm_head_type="lane"))
    assert set(one.reduce_mlp) == {Reduce.NOW} and one.delay == 0 and one.head is Head.CONCAT


def test_laneformer_defaults():
    spec = read_spec({"model_type": "laneformer"})
    assert (spec.hidden_size, spec.num_layers, spec.num_kv_heads) == (4096, 32, 32)
    assert (spec.vocab_size, spec.intermediate_size, spec.norm_eps) == (128256, 16384, 1e-5)


def test_yarn_stretches_a_trained_context():
    scaling = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
    assert read_spec(tiny.LLAMA | {"rope_scaling": scaling}).max_context == 256
    long = tiny.LLAMA | {"rope_scaling": scaling, "max_position_embeddings": 1024}
    assert read_spec(long).max_context == 1024


def test_unknown_shape_lists_the_known_ones():
    with pytest.raises(ModelError) as caught:
        named_shape("gpt-5")
    assert all(name in str(caught.value) for name in SHAPES)
