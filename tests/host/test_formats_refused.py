"""Narrow checkpoints that are unknown or damaged: each is refused in one line that names the item."""

import json

import pytest
import torch

from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.errors import ModelError
from tests.lib import narrow_cases, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


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
    ("gptq_v1", lambda q: q.update(checkpoint_format="gptq", format="gptq_v2"), "format is 'gptq_v2'"),
    ("awq_g128", lambda q: q.update(format="gemv"), "format is 'gemv'"),
    ("ct_int4_g32", lambda q: q.update(config_groups={"\n\x1b[2J": 5}), r"\\n\\x1b\[2J is 5"),
    ("ct_int4_g32", lambda q: q.update(config_groups={"x" * 1000: 5}), "x is 5"),
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
    narrow_cases.edit(tmp_path, change)
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
    ("fp8_block", lambda t: t[f"{Q}.weight_scale_inv"].fill_(3e38), "so large that float32"),
    ("ct_mxfp4", lambda t: t[f"{Q}.weight_scale"].fill_(254), "so large that float32"),
    ("gptq_v1", lambda t: t.update({f"{Q}.bias": torch.ones(256)}), "q_proj.bias' is not part"),
    ("ct_int8", lambda t: t.update({f"{Q}.bias": torch.ones(256)}), "q_proj.bias' is not part"),
    (
        "ct_int8",
        lambda t: t.update({f"{Q}.qweight": t.pop(f"{Q}.weight")}),
        "q_proj.weight' is missing: .*q_proj.qweight' is there",
    ),
    ("fp8_block", lambda t: t.update({"x.weight": torch.ones(1)}), "'x.weight' is not part"),
    ("awq_g32", lambda t: t.update({f"{Q}.qzeros": t[f"{Q}.qzeros"].float()}), "qzeros.*F32"),
    ("awq_g32", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"][:-1].clone()}), "scales.*shape"),
    ("gptq_v1", lambda t: t[f"{DOWN}.g_idx"].copy_(t[f"{DOWN}.g_idx"].flip(0)), "act-order"),
    ("gptq_v1", lambda t: t[f"{Q}.qzeros"].fill_(-1), "for 0 or for 16"),
    ("gptq_v1_symmetric", lambda t: t[f"{Q}.qzeros"].fill_(0), "sym is true"),
    ("ct_int4_g32", lambda t: t[f"{Q}.weight_shape"].fill_(7), "weight_shape is not"),
    ("ct_int4_g32", lambda t: t.update({f"{Q}.weight_g_idx": torch.ones(128)}), "reorders columns"),
    ("ct_int8", lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.uint8)}), "stored as U8"),
    ("mxfp4", lambda t: t[f"{Q}.weight_scales"].fill_(255), "not finite"),
]


@pytest.mark.parametrize(("name", "change", "message"), TENSORS)
def test_what_is_damaged_is_refused_by_name(name, change, message, tmp_path):
    narrow_cases.checkpoint(name, tmp_path)
    narrow_cases.edit_tensors(tmp_path, change)
    with pytest.raises(ModelError, match=message) as error:
        checkpoint = Checkpoint.open(tmp_path)
        for name in checkpoint.names():
            checkpoint.load(name)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize("narrow", ["model.embed_tokens", "lm_head"])
def test_a_tied_head_beside_another_form_of_the_embedding_is_refused(narrow, tmp_path):
    narrow_cases.checkpoint("ct_int8", tmp_path)

    def change(tensors):
        one = narrow_cases.int8(tensors.pop(f"{narrow}.weight").double().numpy())
        tensors |= {f"{narrow}.{suffix}": t for suffix, t in one.tensors.items()}

    narrow_cases.edit_tensors(tmp_path, change)
    narrow_cases.edit(tmp_path, lambda q: q.pop("ignore"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"'lm_head\.weight"):
        Checkpoint.open(tmp_path)


def test_a_narrow_model_of_lanes_is_refused_where_a_format_holds_none(tmp_path):
    config = tiny.laneformer_config(quantization_config=narrow_cases.AWQ)
    tensors = tiny.laneformer_tensors(config)
    name = "model.layers.0.attention.wq"
    tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight").to(torch.int32)
    tiny.save_folder(tmp_path, config, tensors)
    with pytest.raises(ModelError, match="holds no lanes"):
        Checkpoint.open(tmp_path)
