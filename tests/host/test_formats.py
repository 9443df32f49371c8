"""Narrow checkpoints: weights equal the formats' formulas to the last bit, logits transformers' on those weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.errors import ModelError
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from tests.lib import narrow_cases, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
LOGITS = 1e-5  # relative error of the reference's logits


def canonical(stored):
    """ "layers.0.q_proj" of "model.layers.0.self_attn.q_proj.weight"."""
    _, _, layer, _, name, _ = stored.split(".")
    return f"layers.{layer}.{name}"


def assert_same_logits(folder, model):
    ids = tiny.token_ids(40, model.config.vocab_size)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].double()
    got = ReferenceBackend(Checkpoint.open(folder), BackendOptions()).forward_logits(ids)
    assert want.std() >= 2
    error = (torch.from_numpy(got).double() - want).norm() / want.norm()
    assert error <= LOGITS


@pytest.mark.parametrize("name", narrow_cases.CASES)
def test_values_and_logits(name, tmp_path):
    model, values = narrow_cases.checkpoint(name, tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    narrow = dict(checkpoint.spec.narrow)
    assert set(narrow) == {canonical(n) for n in values}
    for stored, want in values.items():
        got = checkpoint.load(canonical(stored))
        assert got.dtype is torch.float32 and torch.equal(got[0], want)
        assert checkpoint.narrow(canonical(stored)).format == narrow[canonical(stored)]
    assert checkpoint.narrow("lm_head") is None and checkpoint.narrow("norm") is None
    assert_same_logits(tmp_path, model)


EXPECTED = {
    "fp8_block": FORMATS["fp8-block"],
    "fp8_block_e8m0": WeightFormat(Code.E4M3, 128, 128, Scale.E8M0),
    "fp8_tensor": WeightFormat(Code.E4M3, 0, 0, Scale.F32),
    "ct_fp8_channel": WeightFormat(Code.E4M3, 1, 0, Scale.BF16),
    "ct_int8": FORMATS["int8-channel"],
    "ct_int4_g64_asymmetric": WeightFormat(Code.UINT4, 1, 64, Scale.F16, Offset.ZERO_POINT),
    "ct_int4_g32": FORMATS["int4-g32"],
    "awq_g128": WeightFormat(Code.UINT4, 1, 128, Scale.F16, Offset.ZERO_POINT),
    "gptq_v1": WeightFormat(Code.UINT4, 1, 128, Scale.F16, Offset.ZERO_POINT),
    "gptq_v1_symmetric": WeightFormat(Code.UINT4, 1, 64, Scale.F16),
    "ct_mxfp4": FORMATS["mxfp4"],
    "mxfp4": FORMATS["mxfp4"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_format_is_told_by_the_headers(name, tmp_path):
    narrow_cases.checkpoint(name, tmp_path)
    assert {how for _, how in Checkpoint.open(tmp_path).spec.narrow} == {EXPECTED[name]}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral"])
def test_every_family(family, tmp_path):
    model, _ = narrow_cases.checkpoint("ct_int4_g32", tmp_path, family)
    assert_same_logits(tmp_path, model)


def test_a_mixed_checkpoint_says_which_weights_are_narrow(tmp_path):
    model, values = narrow_cases.checkpoint(
        "fp8_block", tmp_path, wide=("o_proj", "1.mlp.down_proj")
    )
    checkpoint = Checkpoint.open(tmp_path)
    names = {n for n, _ in checkpoint.spec.narrow}
    assert "layers.0.o_proj" not in names and "layers.1.down_proj" not in names
    assert {"layers.0.down_proj", "layers.1.q_proj"} <= names and len(names) == len(values)
    assert_same_logits(tmp_path, model)


def test_groups_of_modules_have_formats_of_their_own(tmp_path):
    """down_proj in 8 bits, the rest in 4: two groups, the second one's target a class."""
    model, _ = narrow_cases.checkpoint("ct_int4_g32", tmp_path, wide=("down_proj",))
    tensors = load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    for name in [n for n in tensors if n.endswith("down_proj.weight")]:
        one = narrow_cases.int8(tensors.pop(name).double().numpy())
        tensors |= {name.removesuffix("weight") + s: t for s, t in one.tensors.items()}
        state[name].copy_(one.values)
    save_file(tensors, tmp_path / "model.safetensors")

    def change(quantization):
        four = quantization["config_groups"]["group_0"] | {"format": "pack-quantized"}
        eight = {
            "targets": [r"re:.*\.(down|none)_proj$"],
            "weights": narrow_cases.weight_args(8, "int", "channel"),
            "format": "int-quantized",
        }
        quantization["config_groups"] = {"group_0": four, "group_1": eight}
        quantization["format"] = "mixed-precision"

    edit(tmp_path, change)
    kinds = {n.rpartition(".")[2]: how.name for n, how in Checkpoint.open(tmp_path).spec.narrow}
    assert kinds["down_proj"] == "int8 channel" and kinds["up_proj"] == "int4 g32"
    assert_same_logits(tmp_path, model)


def test_activation_schemes_are_read_as_weights_alone_and_said_so(tmp_path):
    for name, said in (("fp8_block", "dynamic"), ("fp8_tensor", "static"), ("ct_int8", "narrow")):
        narrow_cases.checkpoint(name, tmp_path / name)
        (note,) = Checkpoint.open(tmp_path / name).notes
        assert "activations stay wide" in note and said in note
    narrow_cases.checkpoint("awq_g32", tmp_path / "awq")
    assert Checkpoint.open(tmp_path / "awq").notes == ()


def test_scales_of_activations_and_cache_are_left_alone(tmp_path):
    narrow_cases.checkpoint("ct_fp8_tensor", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("self_attn.q_proj.input_scale", "self_attn.k_scale", "self_attn.v_scale"):
        tensors[f"model.layers.0.{part}"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="k_scale"):
        Checkpoint.open(tmp_path)
    edit(tmp_path, lambda q: q.update(kv_cache_scheme={"num_bits": 8}))
    assert any("KV cache" in note for note in Checkpoint.open(tmp_path).notes)


# ---- bytes ----


@pytest.mark.parametrize(
    ("name", "bits"),
    [("int4-g128", 4.125), ("int4-g32", 4.5), ("mxfp4", 4.25), ("fp8-block", 8 + 32 / 128**2)],
)
def test_bits_of_a_weight(name, bits):
    assert FORMATS[name].bytes(4096, 4096) == 4096 * 4096 * bits / 8


def test_bytes_of_a_token_count_codes_scales_and_zero_points(tmp_path):
    narrow_cases.checkpoint("awq_g128", tmp_path)
    spec = Checkpoint.open(tmp_path).spec
    read = load_file(tmp_path / "model.safetensors")
    want = sum(t.nbytes for n, t in read.items() if not n.endswith("g_idx"))
    want -= read["model.embed_tokens.weight"].nbytes * (spec.vocab_size - 1) // spec.vocab_size
    assert spec.bytes_per_token == want


# ---- refusals ----


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def weights_of(quantization):
    return quantization["config_groups"]["group_0"]["weights"]


CONFIGS = [
    ("fp8_block", lambda q: q.update(quant_method="bitsandbytes"), "quant_method.*'bitsandbytes'"),
    ("fp8_block", lambda q: q.pop("quant_method"), "quant_method is missing"),
    ("fp8_block", lambda q: q.update(fmt="e5m2"), "quantization_config.fmt is 'e5m2'"),
    ("fp8_block", lambda q: q.update(weight_block_size=[128]), "weight_block_size"),
    ("fp8_block", lambda q: q.update(weight_block_size=[64, 64]), "weight_scale_inv.*shape"),
    ("fp8_block", lambda q: q.update(modules_to_not_convert=["q_proj"]), "excludes it"),
    ("fp8_block", lambda q: q.update(modules_to_not_convert="q_proj"), "list of module names"),
    ("fp8_tensor", lambda q: q.update(weight_block_size=[128, 128]), "weight_scale_inv.*shape"),
    ("fp8_block", lambda q: q.update(weight_block_size=None), "without weight_block_size"),
    ("awq_g128", lambda q: q.update(bits=3), "quantization_config.bits is 3"),
    ("awq_g128", lambda q: q.update(version="gemv"), "version is 'gemv'"),
    ("awq_g128", lambda q: q.update(zero_point=False), "zero_point is False"),
    ("awq_g128", lambda q: q.update(group_size=96), "groups of 96"),
    ("awq_g128", lambda q: q.update(group_size=0), "group_size is 0"),
    ("gptq_v1", lambda q: q.update(desc_act=True), "desc_act is True"),
    ("gptq_v1", lambda q: q.update(bits=8), "bits is 8"),
    ("gptq_v1", lambda q: q.update(dynamic={"-:.*": {}}), "dynamic is"),
    ("gptq_v1", lambda q: q.update(checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    ("gptq_v1", lambda q: q.update(group_size=64), "qzeros.*shape"),
    ("ct_int4_g32", lambda q: q.update(format="nvfp4-pack-quantized"), "format is 'nvfp4"),
    ("ct_int4_g32", lambda q: q.update(format="int-quantized"), "not supported"),
    ("ct_int4_g32", lambda q: weights_of(q).update(actorder="group"), "actorder is 'group'"),
    ("ct_int4_g32", lambda q: weights_of(q).update(num_bits=3), "3 bits of int"),
    ("ct_int4_g32", lambda q: weights_of(q).update(group_size=0), "group_size"),
    ("ct_int4_g32", lambda q: weights_of(q).update(dynamic=True), "dynamic is True"),
    ("ct_int4_g32", lambda q: weights_of(q).update(symmetric=False), "weight_zero_point.*missing"),
    ("ct_int4_g32", lambda q: q.update(ignore=["re:.*q_proj"]), "ignores it"),
    ("ct_int4_g32", lambda q: q.update(ignore=["re:(a+)+$"]), "not one that is run"),
    ("ct_int4_g32", lambda q: q.update(ignore=["re:(a"]), "pattern"),
    ("ct_int4_g32", lambda q: q.update(config_groups={}), "config_groups"),
    ("ct_int4_g32", lambda q: q.update(sparsity_config={"format": "x"}), "sparsity_config"),
    ("ct_int4_g32", lambda q: q["config_groups"]["group_0"].update(targets=["none"]), "no group"),
    ("ct_mxfp4", lambda q: weights_of(q).update(group_size=16), "not supported"),
    ("ct_fp8_block", lambda q: weights_of(q).update(block_structure=None), "block_structure"),
]


@pytest.mark.parametrize(("name", "change", "message"), CONFIGS)
def test_what_is_unknown_is_refused_by_name(name, change, message, tmp_path):
    narrow_cases.checkpoint(name, tmp_path)
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=message) as error:
        Checkpoint.open(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def clear_codes(tensors):
    """NaN among FP8 codes."""
    tensors[f"{Q}.weight"].view(torch.uint8)[3, 5] = 0x7F


TENSORS = [
    ("fp8_block", lambda t: t.pop(f"{Q}.weight_scale_inv"), "weight_scale_inv'? is missing"),
    ("fp8_block", lambda t: t[f"{Q}.weight_scale_inv"].fill_(torch.inf), "a scale is not finite"),
    ("fp8_block_e8m0", lambda t: t[f"{Q}.weight_scale_inv"].view(torch.uint8).fill_(255), "finite"),
    ("fp8_block", clear_codes, "a weight is NaN"),
    ("fp8_block", lambda t: t.update({"x.weight": torch.ones(1)}), "'x.weight' is not part"),
    ("awq_g32", lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"].float()}), "qzeros.*F32"),
    (
        "awq_g32",
        lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:-1].clone()}),
        "scales.*shape",
    ),
    ("gptq_v1", lambda t: t[f"{DOWN}.g_idx"].copy_(t[f"{DOWN}.g_idx"].flip(0)), "act-order"),
    ("gptq_v1", lambda t: t[f"{Q}.qzeros"].fill_(-1), "for 0 or for 16"),
    ("gptq_v1_symmetric", lambda t: t[f"{Q}.qzeros"].fill_(0), "sym is true"),
    ("ct_int4_g32", lambda t: t[f"{Q}.weight_shape"].fill_(7), "weight_shape is not"),
    ("ct_int4_g32", lambda t: t.update({f"{Q}.weight_g_idx": torch.ones(128)}), "reorders columns"),
    (
        "ct_int8",
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.uint8)}),
        "stored as U8",
    ),
    ("mxfp4", lambda t: t[f"{Q}.weight_scales"].fill_(255), "not finite"),
]


@pytest.mark.parametrize(("name", "change", "message"), TENSORS)
def test_what_is_damaged_is_refused_by_name(name, change, message, tmp_path):
    narrow_cases.checkpoint(name, tmp_path)
    tensors = {n: t.clone() for n, t in load_file(tmp_path / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message) as error:
        checkpoint = Checkpoint.open(tmp_path)
        for name in checkpoint.names():
            checkpoint.load(name)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_narrow_model_of_lanes_is_refused_where_a_format_holds_none(tmp_path):
    config = tiny.laneformer_config(quantization_config=narrow_cases.AWQ)
    tensors = tiny.laneformer_tensors(config)
    name = "model.layers.0.attention.wq"
    tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight").to(torch.int32)
    tiny.save_folder(tmp_path, config, tensors)
    with pytest.raises(ModelError, match="holds no lanes"):
        Checkpoint.open(tmp_path)


# ---- the internal form ----


def open_narrow(name, folder, weight="layers.0.down_proj"):
    narrow_cases.checkpoint(name, folder)
    return Checkpoint.open(folder).narrow(weight)


@pytest.mark.parametrize("name", ["fp8_block", "ct_fp8_channel", "fp8_tensor", "awq_g32", "mxfp4"])
def test_a_cut_at_groups_is_a_part_of_the_weight(name, tmp_path):
    whole = open_narrow(name, tmp_path)
    rows = slice(128, whole.shape[1]) if name == "fp8_block" else slice(3, 50)
    cols = slice(0, whole.shape[2]) if name == "ct_fp8_channel" else slice(128, 256)
    if name == "fp8_tensor":
        rows, cols = slice(0, whole.shape[1]), slice(0, whole.shape[2])
    part = whole.cut(rows, cols)
    assert torch.equal(part.unpack(), whole.unpack()[:, rows, cols]) and part.unpack().numel()


@pytest.mark.parametrize(
    ("name", "rows", "cols"),
    [
        ("fp8_block", slice(64, 128), slice(0, 128)),
        ("fp8_block", slice(0, 128), slice(0, 64)),
        ("awq_g32", slice(0, 8), slice(16, 64)),
        ("ct_fp8_channel", slice(0, 8), slice(0, 128)),
        ("fp8_tensor", slice(0, 8), slice(0, 384)),
        ("mxfp4", slice(0, 8, 2), slice(0, 384)),
    ],
)
def test_a_cut_through_a_group_is_refused(name, rows, cols, tmp_path):
    with pytest.raises(ModelError, match="are not cut at"):
        open_narrow(name, tmp_path).cut(rows, cols)


def test_rows_that_share_scales_keep_their_order(tmp_path):
    order = torch.arange(128).flip(0)
    part = open_narrow("awq_g32", tmp_path / "awq")
    assert torch.equal(part.take_rows(order).unpack(), part.unpack()[:, order])
    with pytest.raises(ModelError, match="keep their order"):
        open_narrow("fp8_block", tmp_path / "fp8").take_rows(order)
