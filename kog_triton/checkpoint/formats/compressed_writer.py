"""The compressed-tensors layout, written: the tensors of one module, and the config.json that names them.

The inverse of compressed_tensors.py, for symmetric weights.
"""

from typing import Any

import torch

from kog_triton.checkpoint.formats.compressed_tensors import METHOD
from kog_triton.checkpoint.formats.packed import pack_words
from kog_triton.checkpoint.narrow import NarrowTensor
from kog_triton.model.weight_format import Code, WeightFormat

LAYOUTS = {Code.E4M3: "float-quantized", Code.INT8: "int-quantized", Code.UINT4: "pack-quantized"}


def stored_tensors(weight: NarrowTensor) -> dict[str, torch.Tensor]:
    """What a file holds of a module, by what follows its name."""
    if weight.format.code is Code.UINT4:
        return {
            "weight_packed": pack_words(weight.codes, weight.format.code.bits),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
    codes = weight.codes
    if weight.format.code is Code.E4M3:
        codes = codes.view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": weight.scales}


def quantization_config(how: WeightFormat, ignore: list[str]) -> dict[str, Any]:
    """`quantization_config` of a checkpoint whose linear modules are stored so, but for those in `ignore`.

    Activations are dynamic where vLLM's kernels for the format quantize them, and absent for int4.
    """
    is_float = how.code is Code.E4M3
    weights: dict[str, Any] = {
        "num_bits": how.code.bits,
        "type": "float" if is_float else "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel",
    }
    if how.group_rows > 1:
        weights |= {"strategy": "block", "block_structure": [how.group_rows, how.group_cols]}
    elif how.group_cols:
        weights |= {"strategy": "group", "group_size": how.group_cols}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if how.code is not Code.UINT4:
        activations = {"num_bits": 8, "type": weights["type"], "symmetric": True, "dynamic": True}
        by_group = {"strategy": "group", "group_size": how.group_cols}
        activations |= by_group if how.group_rows > 1 else {"strategy": "token"}
        group["input_activations"] = activations
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": LAYOUTS[how.code],
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
