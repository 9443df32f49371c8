"""What each format reads of `quantization_config`, value by value, and what it takes of the files: no weights."""

from pathlib import Path

import pytest
import torch

from kog_triton.checkpoint.formats import read_scheme, without_scheme
from kog_triton.checkpoint.formats.compressed_tensors import _group
from kog_triton.checkpoint.formats.module import Module
from kog_triton.checkpoint.narrow import NarrowTensor
from kog_triton.checkpoint.tensor_files import StoredTensor
from kog_triton.errors import ModelError
from kog_triton.model.config import Config
from kog_triton.model.weight_format import Code, Offset, Scale, WeightFormat


def scheme(method, **fields):
    return read_scheme({"quantization_config": {"quant_method": method} | fields}, "config.json")


def refusal(method, **fields):
    with pytest.raises(ModelError) as error:
        scheme(method, **fields)
    return str(error.value)


class Stored:
    """Files that hold tensors of these shapes and types, of a module called "m"."""

    def __init__(self, **tensors):
        self.stored = {
            f"m.{name}": StoredTensor(Path("f.safetensors"), shape, dtype) for name, (dtype, shape) in tensors.items()
        }


def found(read, shape=(16, 64), **tensors):
    module = Module(Stored(**tensors), "m", shape)
    one = read.find(module)
    assert one is None or {f"m.{name}" for name in tensors} == {*module.used}
    return one and one.format


def wrong(read, shape=(16, 64), **tensors):
    with pytest.raises(ModelError) as error:
        read.find(Module(Stored(**tensors), "m", shape))
    return str(error.value)


WEIGHTS = {
    "nothing said": ({}, (Code.INT8, (0, 0), True, "int-quantized"), "int-quantized"),
    "channel": ({"group_size": -1}, (Code.INT8, (1, 0), True, "int-quantized"), "int-quantized"),
    "group": ({"group_size": 32}, (Code.INT8, (1, 32), True, "int-quantized"), "int-quantized"),
    "group of one": ({"group_size": 1}, (Code.INT8, (1, 1), True, "int-quantized"), "int-quantized"),
    "strategy channel": (
        {"group_size": 32, "strategy": "channel"}, (Code.INT8, (1, 0), True, "int-quantized"), "int-quantized"),
    "block": (
        {"strategy": "block", "block_structure": [2, 4], "type": "float"},
        (Code.E4M3, (2, 4), True, "float-quantized"), "float-quantized"),
    "naive float": ({"type": "float"}, (Code.E4M3, (0, 0), True, "naive-quantized"), "naive-quantized"),
    "naive int": ({}, (Code.INT8, (0, 0), True, "naive-quantized"), "naive-quantized"),
    "not symmetric": ({"symmetric": False}, (Code.INT8, (0, 0), False, "int-quantized"), "int-quantized"),
    "packed int8": ({}, (Code.INT8, (0, 0), True, "pack-quantized"), "pack-quantized"),
    "packed int4, channel": (
        {"num_bits": 4, "group_size": -1}, (Code.UINT4, (1, 0), True, "pack-quantized"), "pack-quantized"),
    "packed int4, group": (
        {"num_bits": 4, "group_size": 128, "actorder": "weight", "symmetric": False},
        (Code.UINT4, (1, 128), False, "pack-quantized"), "pack-quantized"),
    "mxfp4": (
        {"num_bits": 4, "type": "float", "group_size": 32},
        (Code.E2M1, (1, 32), True, "mxfp4-pack-quantized"), "mxfp4-pack-quantized"),
}  # fmt: skip


def group_of(weights, layout, **whole):
    said = weights if weights is None else {"num_bits": 8} | weights
    entry = Config({"weights": said, "targets": ["Linear"], "format": layout})
    return _group(entry, Config(whole))


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_group_of_compressed_tensors(name):
    weights, expected, layout = WEIGHTS[name]
    one = group_of(weights, layout)
    assert (one.code, one.group, one.symmetric, one.layout) == expected
    assert one.targets.exact == {"Linear"}
    assert group_of(weights, None, format=layout).layout == layout


@pytest.mark.parametrize(
    ("weights", "layout", "said"),
    [
        ({"num_bits": 4}, "pack-quantized", "4 bits of int, strategy 'tensor', format 'pack-quantized'"),
        ({"num_bits": 4, "group_size": 8}, "int-quantized", "4 bits of int, strategy 'group', format 'int-quantized'"),
        ({}, "float-quantized", "8 bits of int, strategy 'tensor', format 'float-quantized'"),
        ({"type": "float"}, "int-quantized", "8 bits of float, strategy 'tensor', format 'int-quantized'"),
        ({"type": "float"}, "pack-quantized", "8 bits of float, strategy 'tensor', format 'pack-quantized'"),
        ({"num_bits": 16}, "int-quantized", "16 bits of int, strategy 'tensor', format 'int-quantized'"),
        ({"num_bits": 4, "type": "float", "group_size": 32}, "pack-quantized",
         "4 bits of float, strategy 'group', format 'pack-quantized'"),
        ({"num_bits": 4, "type": "float", "group_size": 16}, "mxfp4-pack-quantized",
         "4 bits of float, strategy 'group', format 'mxfp4-pack-quantized'"),
        ({"num_bits": 4, "type": "float", "group_size": 32, "strategy": "channel"}, "mxfp4-pack-quantized",
         "4 bits of float, strategy 'channel', format 'mxfp4-pack-quantized'"),
        ({"num_bits": 4, "group_size": 32}, "mxfp4-pack-quantized",
         "4 bits of int, strategy 'group', format 'mxfp4-pack-quantized'"),
    ],
)  # fmt: skip
def test_a_combination_that_is_not_read(weights, layout, said):
    with pytest.raises(ModelError) as error:
        group_of(weights, layout)
    assert str(error.value) == f"weights.num_bits: {said}: this combination is not supported"


@pytest.mark.parametrize(
    ("weights", "layout", "says"),
    [
        ({"strategy": "group"}, "int-quantized", "group_size"),
        ({"strategy": "group", "group_size": 0}, "int-quantized", "group_size"),
        ({"strategy": "group", "group_size": -1}, "int-quantized", "group_size"),
        ({"group_size": -2}, "int-quantized", "group_size"),
        ({"group_size": 65537}, "int-quantized", "group_size"),
        ({"num_bits": 17}, "int-quantized", "num_bits"),
        ({"num_bits": 0}, "int-quantized", "num_bits"),
        ({"type": "fp"}, "int-quantized", "type"),
        ({"strategy": "row"}, "int-quantized", "strategy"),
        ({"strategy": "block", "type": "float"}, "float-quantized", "block_structure"),
        ({"strategy": "block", "type": "float", "block_structure": [1]}, "float-quantized", "block_structure"),
        ({"strategy": "block", "type": "float", "block_structure": [1, 2, 3]}, "float-quantized", "block_structure"),
        ({"strategy": "block", "type": "float", "block_structure": [0, 1]}, "float-quantized", "block_structure"),
        ({"dynamic": True}, "int-quantized", "dynamic"),
        ({"actorder": "group"}, "int-quantized", "actorder"),
        ({"type": "float", "symmetric": False}, "float-quantized", "symmetric"),
        ({"num_bits": 4, "type": "float", "group_size": 32, "symmetric": False}, "mxfp4-pack-quantized", "symmetric"),
        ({}, "no such", "format"),
    ],
)  # fmt: skip
def test_a_field_of_a_group_that_is_not_read(weights, layout, says):
    with pytest.raises(ModelError) as error:
        group_of(weights, layout)
    named = says if says == "format" else f"weights.{says}"
    assert str(error.value).startswith(named), str(error.value)


def test_a_group_without_weights_or_a_format():
    with pytest.raises(ModelError, match="weights"):
        group_of(None, "int-quantized")
    with pytest.raises(ModelError, match=r"format.*mxfp4-pack-quantized"):
        group_of({}, None)
    with pytest.raises(ModelError, match="format"):
        group_of({}, None, format="no such")


INT8 = {"weights": {"num_bits": 8}, "targets": []}
COMPRESSED = {"config_groups": {"a": {"weights": {"num_bits": 8}, "targets": ["Linear"]}}, "format": "int-quantized"}


@pytest.mark.parametrize(
    ("changed", "notes", "harmless"),
    [
        ({}, 0, 0),
        ({"kv_cache_scheme": {"num_bits": 8}}, 1, 2),
        ({"quantization_status": "frozen", "sparsity_config": {"format": "dense"}, "transform_config": {}}, 0, 0),
        ({"config_groups": {"a": INT8 | {"input_activations": {"num_bits": 8}}}}, 1, 0),
        ({"config_groups": {"a": INT8 | {"output_activations": {"num_bits": 8}}}}, 1, 0),
    ],
)  # fmt: skip
def test_what_stays_wide_is_said_once(changed, notes, harmless):
    read = scheme("compressed-tensors", **(COMPRESSED | changed))
    assert (len(read.notes), len(read.harmless), len(read.groups)) == (notes, harmless, 1)
    assert read.ignore.exact == frozenset()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"transform_config": {"a": 1}}, "transform_config"),
        ({"sparsity_config": {"format": "2:4"}}, "sparsity_config"),
        ({"quantization_status": "calibration"}, "quantization_status"),
        ({"config_groups": None}, "config_groups"),
        ({"config_groups": {"a": None}}, "config_groups.a"),
    ],
)
def test_what_is_not_read_of_compressed_tensors(changed, field):
    said = refusal("compressed-tensors", **(COMPRESSED | changed))
    assert said.startswith("config.json: quantization_config.") and field in said


def test_which_group_of_compressed_tensors_a_module_has():
    groups = {
        "all": {"weights": {"group_size": -1}, "targets": ["Linear"]},
        "one": {"weights": {"num_bits": 8}, "targets": ["re:m", "other"]},
    }
    read = scheme("compressed-tensors", config_groups=groups, format="int-quantized", ignore=["x", "re:y"])
    assert [read.ignore.named(n) for n in ("x", "ya", "ay", "xa")] == [True, True, False, False]
    one = found(read, weight=("I8", (16, 64)), weight_scale=("F32", (1,)))
    assert one == WeightFormat(Code.INT8, 0, 0, Scale.F32)
    zeros = {"weight_zero_point": ("I8", (1,)), "input_scale": ("F32", ())}
    one = found(read, weight=("I8", (16, 64)), weight_scale=("BF16", ()), **zeros)
    assert one == WeightFormat(Code.INT8, 0, 0, Scale.BF16)
    assert found(read) is None and not Module(Stored(weight=("BF16", (16, 64))), "m", (16, 64)).used
    alone = scheme("compressed-tensors", config_groups={"all": groups["all"]}, format="int-quantized")
    assert found(alone, weight=("I8", (16, 64)), weight_scale=("F32", (16, 1))).group_rows == 1
    said = wrong(alone, weight=("I8", (16, 64)), weight_scale=("F32", (16, 2)))
    assert "has shape [16, 2], config.json asks for [16, 1]" in said
    ignoring = scheme("compressed-tensors", config_groups={"all": groups["all"]}, format="int-quantized", ignore=["m"])
    assert "stored narrow although quantization_config ignores it" in wrong(ignoring, weight=("I8", (16, 64)))
    assert "as its format 'int-quantized' says" in wrong(alone, weight_packed=("I32", (16, 16)))


WORDS = {"qweight": ("I32", (64, 2)), "qzeros": ("I32", (2, 2)), "scales": ("F16", (2, 16))}
GPTQ = {"qweight": ("I32", (8, 16)), "qzeros": ("I32", (2, 2)), "scales": ("F16", (2, 16))}


def test_awq_takes_words_along_the_rows():
    read = scheme("awq", bits=4, zero_point=True, group_size=32)
    assert found(read, **WORDS) == WeightFormat(Code.UINT4, 1, 32, Scale.F16, Offset.ZERO_POINT)
    whole = scheme("awq", bits=4, zero_point=True, group_size=-1, version="GEMM")
    rows = WORDS | {"qzeros": ("I32", (1, 2)), "scales": ("BF16", (1, 16))}
    assert found(whole, **rows) == WeightFormat(Code.UINT4, 1, 0, Scale.BF16, Offset.ZERO_POINT)
    assert found(read) is None
    for name, shape in (
        ("qweight", (64, 4)),
        ("qzeros", (4, 2)),
        ("qzeros", (2, 4)),
        ("scales", (2, 8)),
        ("scales", (4, 16)),
    ):
        changed = WORDS | {name: (WORDS[name][0], shape)}
        assert f"has shape {list(shape)}, config.json asks for" in wrong(read, **changed)
    assert "I64: it must be I32" in wrong(read, **(WORDS | {"qzeros": ("I64", (2, 2))}))
    assert "F64: it must be F32 or BF16 or F16" in wrong(read, **(WORDS | {"scales": ("F64", (2, 16))}))
    assert "is missing beside it" in wrong(read, qweight=WORDS["qweight"])
    assert "12 x 64 weights do not divide into words of 8 and groups of 32" in wrong(read, (12, 64), **WORDS)
    assert "16 x 48 weights do not divide into words of 8 and groups of 32" in wrong(read, (16, 48), **WORDS)
    assert "this format holds no lanes" in wrong(read, (2, 16, 64), **WORDS)
    without = scheme("awq", bits=4, zero_point=True, group_size=32, modules_to_not_convert=["m"])
    assert "it has a qweight although quantization_config excludes it" in wrong(without, **WORDS)


@pytest.mark.parametrize(
    ("method", "fields", "field"),
    [
        ("awq", {"bits": 8}, "bits"),
        ("awq", {"zero_point": False}, "zero_point"),
        ("awq", {"version": "gemv"}, "version"),
        ("awq", {"group_size": 0}, "group_size"),
        ("awq", {"group_size": -2}, "group_size"),
        ("gptq", {"bits": 3}, "bits"),
        ("gptq", {"desc_act": True}, "desc_act"),
        ("gptq", {"dynamic": {"a": 1}}, "dynamic"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq", {"use_marlin": True}, "use_marlin"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq", {"checkpoint_format": "gptq_v2", "format": "gptq"}, "format"),
        ("fp8", {"fmt": "e5m2"}, "fmt"),
        ("fp8", {"scale_fmt": "int"}, "scale_fmt"),
        ("fp8", {"activation_scheme": "none"}, "activation_scheme"),
        ("fp8", {"weight_block_size": [128]}, "weight_block_size"),
        ("fp8", {"weight_block_size": [0, 128]}, "weight_block_size"),
        ("fp8", {"weight_block_size": [1, 65537]}, "weight_block_size"),
        ("bitsandbytes", {}, "quant_method"),
    ],
)
def test_fields_that_are_not_read(method, fields, field):
    said = refusal(method, **({"bits": 4, "zero_point": True, "group_size": 32} if method == "awq" else {}) | fields)
    assert said.startswith(f"config.json: quantization_config.{field}"), said


def test_gptq_takes_words_along_the_columns():
    read = scheme("gptq", bits=4, group_size=32)
    assert (read.group, read.symmetric, read.stored_less) == (32, False, 1)
    assert scheme("gptq", bits=4, group_size=-1, sym=True, format="gptq_v2").stored_less == 0
    assert scheme("gptq", bits=4, group_size=-1, sym=True).group == 0
    assert found(read, **GPTQ) == WeightFormat(Code.UINT4, 1, 32, Scale.F16, Offset.ZERO_POINT)
    symmetric = scheme("gptq", bits=4, group_size=32, sym=True)
    assert found(symmetric, g_idx=("I32", (64,)), **GPTQ) == WeightFormat(Code.UINT4, 1, 32, Scale.F16)
    for name, shape in (("qweight", (4, 16)), ("qzeros", (4, 2)), ("qzeros", (2, 1)), ("scales", (2, 8))):
        changed = GPTQ | {name: (GPTQ[name][0], shape)}
        assert f"has shape {list(shape)}, config.json asks for" in wrong(read, **changed)
    assert "g_idx' has shape [63]" in wrong(read, g_idx=("I32", (63,)), **GPTQ).replace('"', "'")
    for shape in ((12, 64), (16, 60), (16, 48)):
        assert f"{shape[0]} x {shape[1]} weights do not divide into words of 8" in wrong(read, shape, **GPTQ)


def test_fp8_takes_a_grid_of_scales_or_one():
    blocks = scheme("fp8", weight_block_size=[8, 48], ignored_layers=["x"])
    assert blocks.block == (8, 48) and "x" in blocks.excluded and "m" not in blocks.excluded
    grid = {"weight": ("F8_E4M3", (16, 64)), "weight_scale_inv": ("F32", (2, 2))}
    assert found(blocks, **grid) == WeightFormat(Code.E4M3, 8, 48, Scale.F32)
    assert "config.json asks for [2, 2]" in wrong(blocks, **(grid | {"weight_scale_inv": ("F32", (2, 1))}))
    one = scheme("fp8")
    assert one.block == (0, 0) and "dynamic" in one.notes[0]
    assert "static" in scheme("fp8", activation_scheme="static").notes[0]
    for shape in ((), (1,), (1, 1)):
        tensors = {"weight": ("F8_E4M3", (16, 64)), "weight_scale": ("BF16", shape), "input_scale": ("F32", ())}
        assert found(one, **tensors) == WeightFormat(Code.E4M3, 0, 0, Scale.BF16)
    said = wrong(one, weight=("F8_E4M3", (16, 64)), weight_scale=("F32", (16, 1)))
    assert "weight_scale has shape [16, 1]: without weight_block_size it is one value" in said
    assert "'m.weight_scale_inv' is missing" in wrong(one, weight=("F8_E4M3", (16, 64))).replace('"', "'")
    assert found(one) is None and one.find(Module(Stored(weight=("BF16", (16, 64))), "m", (16, 64))) is None
    without = scheme("fp8", modules_to_not_convert=["m"])
    assert "stored as F8_E4M3 although quantization_config excludes it" in wrong(without, **grid)


def test_which_field_says_how_weights_are_stored():
    said = {"quant_method": "fp8"}
    assert read_scheme({}, "f") is None
    assert read_scheme({"compression_config": said}, "f") is not None
    assert without_scheme({"a": 1, "quantization_config": said}) == {"a": 1}
    assert without_scheme({"a": 1, "compression_config": said}) == {"a": 1}
    both = {"quantization_config": None, "compression_config": said}
    assert without_scheme(both) == {"quantization_config": None}
    assert "quant_method" in refusal("")


@pytest.mark.parametrize("offset", [Offset.NONE, Offset.ZERO_POINT])
def test_a_weight_that_is_moved_takes_all_of_its_tensors_along(offset):
    codes, scales = torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 2, dtype=torch.float16)
    points = None if offset is Offset.NONE else torch.zeros(2, 2, dtype=torch.int8)
    weight = NarrowTensor(WeightFormat(Code.INT8, 1, 32, Scale.F16, offset), codes, scales, points)
    moved, given = weight.moved(torch.clone), (codes, scales, points)
    for before, now in zip(given, (moved.codes, moved.scales, moved.offsets), strict=True):
        assert (before is None) is (now is None)
        assert now is None or (now.equal(before) and now.data_ptr() != before.data_ptr())
