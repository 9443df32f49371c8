"""What this package unpacks is what the formats' own packages unpack: compressed-tensors, and transformers' on a CPU.

Their arithmetic is in the type of the scales; scales are given to them as float32, which is what `unpack` computes in.
"""

import pytest
import torch
from safetensors.torch import load_file

from kog_triton.checkpoint.folder import Checkpoint
from tests.lib import narrow_cases

pytestmark = pytest.mark.usefixtures("one_thread")
MODULE, NAME = "model.layers.0.mlp.down_proj", "layers.0.down_proj"


def opened(name, folder, sizes=None):
    """(our values, the module's stored tensors, quantization_config)."""
    narrow_cases.checkpoint(name, folder, sizes=sizes)
    tensors = load_file(folder / "model.safetensors")
    own = {n.removeprefix(f"{MODULE}."): t for n, t in tensors.items() if n.startswith(MODULE)}
    checkpoint = Checkpoint.open(folder)
    return checkpoint.load(NAME)[0], own, checkpoint.config["quantization_config"]


@pytest.mark.parametrize("name", [n for n in narrow_cases.CASES if n.startswith("ct_")])
def test_compressed_tensors_decompresses_to_our_values(name, tmp_path):
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    # its blocks do not go over the edge of a matrix
    sizes = narrow_cases.SIZES if "block" in name else None
    ours, own, config = opened(name, tmp_path, sizes)
    if own["weight_scale"].is_floating_point():
        own["weight_scale"] = own["weight_scale"].float()
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    theirs = compressor.decompress(own, scheme)["weight"]
    assert torch.equal(theirs.float(), ours)


@pytest.mark.parametrize("name", ["awq_g128", "awq_g64", "awq_g32"])
def test_compressed_tensors_converts_awq_to_our_values(name, tmp_path):
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    ours, own, config = opened(name, tmp_path)
    given = {k: config[k] for k in ("bits", "group_size", "zero_point", "version")}
    converter = AutoAWQConverter.from_autoawq_config(given)
    done = converter.process({f"{MODULE}.{k}": t for k, t in own.items()})
    done = {k.removeprefix(f"{MODULE}."): t for k, t in done.items()}
    shape, scale = torch.Size(done["weight_shape"].tolist()), done["weight_scale"].float()
    codes = unpack_from_int32(done["weight_packed"], 4, shape)
    zeros = unpack_from_int32(done["weight_zero_point"], 4, torch.Size([shape[0], scale.shape[1]]), packed_dim=0)
    group = config["group_size"]
    theirs = (codes.float() - zeros.float().repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_bf16_scales", "fp8_block_e8m0", "fp8_tensor"])
def test_transformers_dequantizes_fp8_to_our_values(name, tmp_path):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    # it takes no blocks that go over the edge of a matrix
    ours, own, _ = opened(name, tmp_path, narrow_cases.SIZES)
    scales = own["weight_scale_inv"]
    scales = scales.float() if scales.dtype is torch.bfloat16 else scales
    theirs = Fp8Dequantize(None)._dequantize_one(own["weight"], scales, torch.float32)
    assert torch.equal(theirs, ours)


def test_transformers_dequantizes_mxfp4_to_our_values(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    ours, own, _ = opened("mxfp4", tmp_path)
    theirs = convert_moe_packed_tensors(own["weight_blocks"][None], own["weight_scales"][None], dtype=torch.float32)
    theirs = theirs[0] if theirs.shape[1:] == ours.shape else theirs[0].T
    assert torch.equal(theirs, ours)
