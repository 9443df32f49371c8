"""Narrow checkpoints: weights equal the formats' formulas to the last bit, logits transformers' on those weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.errors import FileError, ModelError
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from tests.lib import gguf_cases, narrow_cases, tiny

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


@pytest.mark.parametrize("name", narrow_cases.CASES)
def test_codes_are_unpacked_behind_the_way_to_a_gpu(name, tmp_path):
    narrow_cases.checkpoint(name, tmp_path)
    checkpoint, brought = Checkpoint.open(tmp_path), []
    weight, _ = checkpoint.spec.narrow[0]
    there = checkpoint.narrow(weight, lambda t: brought.append(t.data_ptr()) or t.clone())
    assert torch.equal(there.unpack(), checkpoint.load(weight))
    files, used = checkpoint._files, checkpoint._weights[weight].found.module.used
    assert brought and {*brought} <= {files.read(stored).data_ptr() for stored in used}


def test_a_file_that_is_lost_on_the_way_is_named_alone(tmp_path):
    narrow_cases.checkpoint("fp8_block", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)

    def lose(_):
        raise FileError("model-00002: ends at byte 5")

    with pytest.raises(FileError, match=r"^model-00002: ends at byte 5$"):
        checkpoint.narrow("layers.0.o_proj", lose)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*narrow_cases.CASES, "Q8_0", "Q4_0", "Q4_1"])
def test_a_gpu_unpacks_what_a_cpu_does(name, tmp_path):
    if name in narrow_cases.CASES:
        narrow_cases.checkpoint(name, tmp_path)
    else:
        gguf_cases.write(tmp_path / "model.gguf", name)
        tmp_path /= "model.gguf"
    checkpoint = Checkpoint.open(tmp_path)
    for weight, _ in checkpoint.spec.narrow:
        there = checkpoint.narrow(weight, torch.Tensor.cuda).unpack()
        assert there.is_cuda and torch.equal(there.cpu(), checkpoint.load(weight))


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
    model, values = narrow_cases.checkpoint("fp8_block", tmp_path, wide=("o_proj", "1.mlp.down_proj"))
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

    narrow_cases.edit(tmp_path, change)
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
    narrow_cases.edit(tmp_path, lambda q: q.update(kv_cache_scheme={"num_bits": 8}))
    assert any("KV cache" in note for note in Checkpoint.open(tmp_path).notes)


def add_zero_biases(tensors):
    """What AutoGPTQ writes beside every module, whether or not the model has biases."""
    for name in [n for n in tensors if n.endswith("qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1]).half()


def to_v2(tensors):
    """Zero points themselves instead of zero points less 1."""
    for name in [n for n in tensors if n.endswith("qzeros")]:
        tensors[name] += 0x11111111


def square_scales(tensors):
    for name in [n for n in tensors if n.endswith("weight_scale")]:
        tensors[name] = tensors[name].reshape(1, 1)


def unsaid(quantization):
    """Writers leave out what is the default of compressed-tensors."""
    group = quantization["config_groups"]["group_0"]
    del group["weights"]["symmetric"]


DENSE = {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}
WRITERS = [
    ("gptq_v1_symmetric", add_zero_biases, lambda q: None),
    ("gptq_v1_symmetric", to_v2, lambda q: q.update(format="gptq_v2")),
    ("awq_g128", lambda t: None, lambda q: q.update(version=None, format="gemm")),
    ("ct_fp8_tensor", square_scales, lambda q: None),
    ("ct_int4_g32", lambda t: None, lambda q: q.update(sparsity_config=DENSE)),
    ("ct_int4_g32", lambda t: None, unsaid),
]


@pytest.mark.parametrize(("name", "change", "says"), WRITERS)
def test_what_some_writers_do_otherwise(name, change, says, tmp_path):
    model, _ = narrow_cases.checkpoint(name, tmp_path)
    narrow_cases.edit_tensors(tmp_path, change)
    narrow_cases.edit(tmp_path, says)
    assert_same_logits(tmp_path, model)


def test_the_older_name_of_the_field(tmp_path):
    model, _ = narrow_cases.checkpoint("ct_int4_g32", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    old = config | {"compression_config": config["quantization_config"]}
    path.write_text(json.dumps(old))
    with pytest.raises(ModelError, match="compression_config is"):
        Checkpoint.open(tmp_path)
    del old["quantization_config"]
    path.write_text(json.dumps(old))
    assert_same_logits(tmp_path, model)


def test_narrow_activations_of_either_side_are_said(tmp_path):
    narrow_cases.checkpoint("ct_int4_g32", tmp_path)
    narrow = {"output_activations": {"num_bits": 8, "type": "float"}}
    narrow_cases.edit(tmp_path, lambda q: q["config_groups"]["group_0"].update(narrow))
    assert "activations stay wide" in Checkpoint.open(tmp_path).notes[0]


# ---- bytes ----


@pytest.mark.parametrize(
    ("name", "bits"), [("int4-g128", 4.125), ("int4-g32", 4.5), ("mxfp4", 4.25), ("fp8-block", 8 + 32 / 128**2)]
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


def test_gptq_without_an_order_of_columns_is_read(tmp_path):
    _, values = narrow_cases.checkpoint("gptq_v1", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    kept = {name: t for name, t in tensors.items() if not name.endswith("g_idx")}
    assert len(kept) < len(tensors)
    save_file(kept, file)
    checkpoint = Checkpoint.open(tmp_path)
    for stored, want in values.items():
        assert torch.equal(checkpoint.load(canonical(stored))[0], want)
