"""Every family computes what its origin computes: transformers, or the plain Laneformer.

The reference backend runs the loaded checkpoint; logits must agree to 2e-4 of their own deviation
at every position, and must be spread, or an error would hide.
"""

import itertools

import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.families import read_spec
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import Head, Reduce
from tests.lib import tiny
from tests.lib.plain_laneformer import plain_forward

TOLERANCE = 2e-4


pytestmark = pytest.mark.usefixtures("one_thread")


def assert_same_logits(folder, ids, want):
    got = ReferenceBackend(Checkpoint.open(folder), BackendOptions()).forward_logits(ids)
    want = want.double()
    spread = want.std().item()
    assert spread >= 4
    error = (torch.from_numpy(got).double() - want).abs().max().item()
    assert error <= TOLERANCE * spread


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1000,
        "mscale": 1.3,
        "mscale_all_dim": 0.7,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn_given": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 80,
        "attention_factor": 1.25,
    },
}
HF_CASES = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral_window": ("mistral", {}),
    "mistral_full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 10}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3_bias_tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_layer_types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
} | {
    f"{family}_{kind}": (family, {"rope_parameters": {"rope_theta": 5000.0} | rope})
    for (kind, rope), family in zip(ROPES.items(), itertools.cycle(["llama", "qwen2", "qwen3"]), strict=False)
}


@pytest.mark.parametrize("case", HF_CASES)
def test_logits_equal_transformers(case, tmp_path):
    family, changes = HF_CASES[case]
    model = tiny.hf_model(family, seed=len(case), **changes)
    tiny.save_hf(model, tmp_path)
    ids = tiny.token_ids(90)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert_same_logits(tmp_path, ids, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_shards_load_exactly(dtype, tmp_path):
    model = tiny.hf_model("qwen2")
    tiny.save_hf(model, tmp_path, dtype, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = tiny.token_ids(20)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert_same_logits(tmp_path, ids, want)


def test_context_far_beyond_the_window(tmp_path):
    model = tiny.hf_model("mistral", sliding_window=40, max_position_embeddings=512)
    tiny.save_hf(model, tmp_path)
    ids = tiny.token_ids(300)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert_same_logits(tmp_path, ids, want)


def laneformer(tmp_path, seed=0, tokens=14, **changes):
    config = tiny.laneformer_config(**changes)
    tensors = tiny.laneformer_tensors(config, seed)
    folder = tiny.save_folder(tmp_path, config, tensors)
    ids = tiny.token_ids(tokens, config["vocab_size"])
    return folder, ids, plain_forward(config, tensors, ids)


HEADS = {
    "mean": {},
    "sum": {"pre_norm_lane_agg": True},
    "vocab": {"lm_head_type": "vocab_parallel"},
    "concat": {"lm_head_type": "lane"},
}
COMM = {
    "early": {},
    "late": {"use_early_comm": False},
    "never": {"use_early_comm": False, "use_comm": False},
    "early_only": {"use_comm": False},
    "mlp_only": {"use_attention_comm": False},
    "attention_only": {"use_mlp_comm": False},
}


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("comm", COMM)
def test_laneformer_equals_the_plain_forward(lanes, head, comm, tmp_path):
    delay = 1 + (lanes + len(head) + len(comm)) % 3
    changes = {"num_lanes": lanes, "broadcast_delay": delay} | HEADS[head] | COMM[comm]
    assert_same_logits(*laneformer(tmp_path, **changes))


@pytest.mark.parametrize("delay", [1, 2, 3, 4, 5, 9])
def test_laneformer_delays(delay, tmp_path):
    assert_same_logits(*laneformer(tmp_path, broadcast_delay=delay, use_early_comm=False))


@pytest.mark.parametrize(
    "changes",
    [
        {"replicated_rmsn_scale": False},
        {"tie_word_embeddings": True},
        {"sliding_window_n_layers": -2},
        {"sliding_window_n_layers": 4, "unclamped_layers": [1, 3]},
        {"sliding_window": None, "sliding_window_n_layers": 3},
        {"model_type": "laneformer", "num_key_value_heads": 16},
    ],
    ids=lambda c: next(iter(c)),
)
def test_laneformer_options(changes, tmp_path):
    config = tiny.laneformer_config(**changes)
    config |= {"sliding_window": config["sliding_window"] or 0}
    tensors = tiny.laneformer_tensors(config, 3)
    folder = tiny.save_folder(tmp_path, tiny.laneformer_config(**changes), tensors)
    ids = tiny.token_ids(24, config["vocab_size"])
    assert_same_logits(folder, ids, plain_forward(config, tensors, ids))


def test_permuting_lanes_leaves_logits_unchanged(tmp_path):
    config = tiny.laneformer_config(use_early_comm=False, replicated_rmsn_scale=False)
    tensors = tiny.laneformer_tensors(config)
    ids = tiny.token_ids(12, config["vocab_size"])
    want = plain_forward(config, tensors, ids)
    shared = ("model.tok_embeddings.weight", "lm_head.weight")
    order = torch.tensor([2, 0, 3, 1])
    reordered = {n: t if n in shared else t[order] for n, t in tensors.items()}
    assert_same_logits(tiny.save_folder(tmp_path, config, reordered), ids, want)


def test_all_early_communication_is_a_plain_llama(tmp_path):
    """A delay beyond the last layer sums lanes at once everywhere: plain tensor parallelism."""
    config = tiny.laneformer_config(broadcast_delay=5, sliding_window_n_layers=0)
    tensors = tiny.laneformer_tensors(config)
    ids = tiny.token_ids(12, config["vocab_size"])
    joined = {}
    for name, t in tensors.items():
        if t.dim() < 3:
            joined[name] = t
        elif name.endswith(("wo.weight", "w2.weight")):
            joined[name] = t.permute(1, 0, 2).flatten(1)[None]
        else:
            joined[name] = t.flatten(0, 1)[None]
    folder = tiny.save_folder(tmp_path, config | {"num_lanes": 1}, joined)
    assert_same_logits(folder, ids, plain_forward(config, tensors, ids))


# ---- specs ----


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("laneformer-2b", 2_320_069_632),
        ("llama-3.2-1b", 1_235_814_400),
        ("qwen3-0.6b", 596_049_920),
        ("qwen2.5-coder-1.5b", 1_543_714_304),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.2-3b", 3_212_749_824),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_248_023_552),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
        ("smollm2-135m", 134_515_008),
        ("llama-2-7b", 6_738_415_616),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("llama-3.3-70b", 70_553_706_496),
        ("mistral-large-123b", 122_610_069_504),
    ],
)
def test_named_shapes_have_the_published_size(name, parameters):
    assert named_shape(name).num_parameters == parameters


@pytest.mark.parametrize(
    "name", ["smollm2-135m", "llama-2-7b", "qwen3-14b", "qwen3-32b", "llama-3.3-70b", "mistral-large-123b"]
)
def test_a_named_shape_has_its_published_arithmetic(name):
    """What no count of parameters shows: heads, norms, RoPE, context and the weights' type."""
    spec = named_shape(name)
    want = {
        "smollm2-135m": (9, 3, 64, 1e-5, 1e5, 8192, "bf16"),
        "llama-2-7b": (32, 32, 128, 1e-5, 1e4, 4096, "f16"),
        "qwen3-14b": (40, 8, 128, 1e-6, 1e6, 40960, "bf16"),
        "qwen3-32b": (64, 8, 128, 1e-6, 1e6, 40960, "bf16"),
        "llama-3.3-70b": (64, 8, 128, 1e-5, 5e5, 131072, "bf16"),
        "mistral-large-123b": (96, 8, 128, 1e-5, 1e6, 131072, "bf16"),
    }
    found = (
        spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.norm_eps, spec.rope.theta,
        spec.max_context, spec.dtype.name.lower(),
    )  # fmt: skip
    assert found == want[name]


def test_published_laneformer_layers():
    spec = named_shape("laneformer-2b")
    assert spec.windows == (2048,) * 10 + (0,) * 5
    assert spec.head_dim == 96 and spec.delay == 2 and spec.head is Head.MEAN
    assert spec.reduce_mlp == (Reduce.OWN,) * 2 + (Reduce.DELAYED,) * 13


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bare_config_means_what_transformers_means(family):
    """Fields left out take the same defaults as in transformers."""
    import transformers

    auto = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    full = getattr(transformers, f"{auto}Config")(hidden_size=2048).to_dict()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    needed = (*sizes, "num_attention_heads", "max_position_embeddings", "model_type")
    bare = read_spec({k: full[k] for k in needed})
    full["dtype"] = None
    assert bare == read_spec(full)


def test_qwen_windows_without_layer_types():
    sliding = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    config = tiny.hf_model("qwen2", **sliding).config.to_dict()
    kinds = config.pop("layer_types")
    assert kinds == ["full_attention", "sliding_attention", "sliding_attention"]
    assert read_spec(config).windows == (0, 9, 9)
    assert read_spec(config | {"use_sliding_window": False}).windows == (0, 0, 0)
    assert read_spec(config | {"max_window_layers": 28}).windows == (0, 0, 0)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
def test_old_and_new_rope_spelling_agree(theta):
    config = tiny.hf_model("llama").config.to_dict() | {"rope_parameters": None}
    scaling = ROPES["llama3"]
    old = read_spec(config | {"rope_theta": theta, "rope_scaling": scaling})
    new = read_spec(config | {"rope_parameters": scaling | {"rope_theta": theta}})
    typed = {k: v for k, v in scaling.items() if k != "rope_type"} | {"type": "llama3"}
    assert old == new == read_spec(config | {"rope_theta": theta, "rope_scaling": typed})
    assert old.rope.original_context == 32


# ---- random weights ----

RANDOM_SPECS = {
    "llama": read_spec(tiny.hf_model("llama").config.to_dict()),
    "qwen3_tied": read_spec(tiny.hf_model("qwen3", tie_word_embeddings=True).config.to_dict()),
    "qwen2": read_spec(tiny.hf_model("qwen2", num_hidden_layers=12).config.to_dict()),
} | {
    f"lanes_{head}_{comm}": read_spec(tiny.laneformer_config(num_lanes=8) | HEADS[head] | COMM[comm])
    for head in HEADS
    for comm in ("late", "never")
}


@pytest.mark.parametrize("name", RANDOM_SPECS)
def test_random_weights_spread_the_logits(name):
    spec = RANDOM_SPECS[name]
    backend = ReferenceBackend(RandomWeights(spec, seed=3), BackendOptions())
    ids = tiny.token_ids(40, spec.vocab_size)
    logits = backend.forward_logits(ids)
    assert 4 <= logits.std() <= 20
    # Text must not just repeat the prompt, as it does when a tied embedding drowns the layers.
    assert (logits.argmax(1) == ids).mean() < 0.5


def test_random_weights_depend_on_name_and_seed_alone():
    spec = RANDOM_SPECS["qwen2"]
    a, b = RandomWeights(spec, 5), RandomWeights(spec, 5)
    b.load("lm_head")
    first = a.load("layers.0.q_proj")
    assert torch.equal(first, b.load("layers.0.q_proj"))
    assert not torch.equal(first, a.load("layers.1.q_proj"))
    assert not torch.equal(first, RandomWeights(spec, 6).load("layers.0.q_proj"))
    assert a.load("layers.0.q_bias").abs().min() > 0
    assert a.load("norm").std() > 0.1
