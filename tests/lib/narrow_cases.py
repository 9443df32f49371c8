"""Narrow checkpoints of every format, written from the formats' published descriptions, and the weights they stand for.

Nothing here is the package's: numpy packs the words nibble by nibble, and `Stored.values` is the formula of the format
in float64, rounded to float32 once. `checkpoint` gives a folder and a transformers model that holds those values.
"""

import json
from dataclasses import dataclass

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.lib import tiny

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Groups of 32, 64 and 128 divide; 192 and 320 are no multiples of FP8 blocks.
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}
EDGES = SIZES | {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6}
E4M3 = np.array(
    [
        (-1) ** (b >> 7)
        * ((b & 7) / 8 * 2.0**-6 if not (b >> 3) & 15 else (1 + (b & 7) / 8) * 2.0 ** ((b >> 3 & 15) - 7))
        for b in range(256)
    ]
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass
class Stored:
    """One module as a file holds it: tensors by what follows its name, and the weights they stand for."""

    tensors: dict
    values: torch.Tensor


def spread(groups, rows, cols, shape):
    """[row groups, column groups] as one value a weight of `shape`."""
    return np.repeat(np.repeat(groups, rows, 0), cols, 1)[: shape[0], : shape[1]]


def largest(w, rows, cols):
    """The largest magnitude of each group of rows x cols."""
    high, wide = -(-w.shape[0] // rows), -(-w.shape[1] // cols)
    padded = np.zeros((high * rows, wide * cols))
    padded[: w.shape[0], : w.shape[1]] = np.abs(w)
    return padded.reshape(high, rows, wide, cols).max((1, 3))


def rounded(values, dtype):
    """Float64 values as a torch tensor of `dtype`, and what that holds."""
    stored = torch.from_numpy(values.astype(np.float32)).to(dtype)
    return stored, stored.double().numpy()


def nearest(values, table):
    """Indices of the entries of `table` nearest to the values, ties to the lower entry."""
    order = np.argsort(table, kind="stable")
    ranks = np.searchsorted((table[order][1:] + table[order][:-1]) / 2, values)
    return order[ranks].astype(np.uint8)


def result(values):
    return torch.from_numpy(values.astype(np.float32))


def words(codes, axis, order=range(8)):
    """Eight 4-bit codes along `axis` as one int32: nibble i holds the code at order[i]."""
    moved = np.moveaxis(codes.astype(np.uint32), axis, -1)
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % 8)])
    eights = moved.reshape(*moved.shape[:-1], -1, 8)
    out = np.zeros(eights.shape[:-1], np.uint32)
    for i, at in enumerate(order):
        out |= eights[..., at] << np.uint32(4 * i)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out, -1, axis)).view(np.int32))


def fp8(w, rows, cols, dtype=torch.float32, name="weight_scale_inv", shape=None, power=False):
    table = np.where(np.isin(np.arange(256), (0x7F, 0xFF)), 1e9, E4M3)  # no NaN
    scales = largest(w, rows, cols) / 448 + 1e-6
    if power:
        scales = 2.0 ** np.ceil(np.log2(scales))
    stored, scales = rounded(scales, dtype)
    if power:
        stored = torch.from_numpy((np.log2(scales) + 127).astype(np.uint8)).view(torch.float8_e8m0fnu)
    each = spread(scales, rows, cols, w.shape)
    codes = nearest(w / each, table)
    tensors = {
        "weight": torch.from_numpy(codes).view(torch.float8_e4m3fn),
        name: stored if shape is None else stored.reshape(shape),
    }
    return Stored(tensors, result(E4M3[codes] * each))


def integers(w, group, bits, asymmetric, dtype):
    """(codes from 0 on, scales, zero points, stored scales) of groups along the columns."""
    half = 1 << bits - 1
    stored, scales = rounded(largest(w, 1, group) / (half - 0.5) + 1e-6, dtype)
    g = np.random.default_rng(w.size)
    zeros = g.integers(half - 2, half + 3, scales.shape) if asymmetric else np.full(scales.shape, half)
    each, zero = (spread(v, 1, group, w.shape) for v in (scales, zeros))
    codes = np.clip(np.round(w / each) + zero, 0, 2 * half - 1).astype(np.int64)
    return codes, stored, zeros, result((codes - zero) * each)


def awq(w, group):
    codes, scales, zeros, values = integers(w, group, 4, True, torch.float16)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes.T, 1, order), "qzeros": words(zeros.T, 1, order), "scales": scales.T.contiguous()}
    return Stored(tensors, values)


def gptq(w, group, asymmetric, less):
    codes, scales, zeros, values = integers(w, group, 4, asymmetric, torch.float16)
    tensors = {
        "qweight": words(codes.T, 0),
        "qzeros": words(zeros.T - less, 1),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(w.shape[1], dtype=torch.int32) // group,
    }
    return Stored(tensors, values)


def packed(w, group, asymmetric, dtype):
    codes, scales, zeros, values = integers(w, group, 4, asymmetric, dtype)
    tensors = {"weight_packed": words(codes, 1), "weight_scale": scales, "weight_shape": torch.tensor(w.shape)}
    if asymmetric:
        tensors["weight_zero_point"] = words(zeros, 0)
    return Stored(tensors, values)


def int8(w, asymmetric=False):
    codes, scales, zeros, values = integers(w, w.shape[1], 8, asymmetric, torch.bfloat16)
    tensors = {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": scales}
    if asymmetric:
        tensors["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
    return Stored(tensors, values)


def packed8(w):
    """8-bit codes, four a word."""
    codes, scales, _, values = integers(w, w.shape[1], 8, False, torch.bfloat16)
    quads = codes.astype(np.uint32).reshape(w.shape[0], -1, 4)
    word = sum(quads[..., i] << np.uint32(8 * i) for i in range(4)).astype(np.uint32)
    tensors = {
        "weight_packed": torch.from_numpy(word.view(np.int32)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(w.shape),
    }
    return Stored(tensors, values)


def mxfp4(w, names):
    exponents = np.ceil(np.log2(largest(w, 1, 32) / 6 + 1e-9)).astype(np.int64)
    each = spread(2.0**exponents, 1, 32, w.shape)
    codes = nearest(w / each, E2M1)
    pairs = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    blocks, scales = names
    shape = (w.shape[0], -1, 16) if blocks == "weight_blocks" else (w.shape[0], -1)
    tensors = {blocks: pairs.reshape(shape), scales: torch.from_numpy((exponents + 127).astype(np.uint8))}
    return Stored(tensors, result(E2M1[codes] * each))


def compressed(weights, layout, activations=None, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    } | more


def weight_args(bits, kind, strategy, **more):
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS |= {"weight_block_size": [128, 128]}
WHOLE = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
DYNAMIC = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False}


def _int4(group, asymmetric, dtype):
    args = weight_args(4, "int", "group", group_size=group, symmetric=not asymmetric)
    return compressed(args, "pack-quantized"), lambda w: packed(w, group, asymmetric, dtype)


# name: (quantization_config, matrix [rows, cols] -> Stored)
CASES = {
    "fp8_block": (BLOCKS, lambda w: fp8(w, 128, 128)),
    "fp8_block_bf16_scales": (BLOCKS, lambda w: fp8(w, 128, 128, torch.bfloat16)),
    "fp8_block_e8m0": (BLOCKS | {"scale_fmt": "ue8m0"}, lambda w: fp8(w, 128, 128, power=True)),
    "fp8_tensor": (WHOLE, lambda w: fp8(w, *w.shape, shape=())),
    "fp8_tensor_old_name": (WHOLE, lambda w: fp8(w, *w.shape, name="weight_scale", shape=(1,))),
    "ct_fp8_channel": (
        compressed(weight_args(8, "float", "channel"), "float-quantized", DYNAMIC),
        lambda w: fp8(w, 1, w.shape[1], torch.bfloat16, "weight_scale"),
    ),
    "ct_fp8_tensor": (
        compressed(weight_args(8, "float", "tensor"), "float-quantized", DYNAMIC),
        lambda w: fp8(w, *w.shape, name="weight_scale", shape=(1,)),
    ),
    "ct_fp8_block": (
        compressed(weight_args(8, "float", "block", block_structure=[128, 128]), "float-quantized", DYNAMIC),
        lambda w: fp8(w, 128, 128, torch.bfloat16, "weight_scale"),
    ),
    "ct_int8": (compressed(weight_args(8, "int", "channel"), "int-quantized", DYNAMIC | {"type": "int"}), int8),
    "ct_int8_asymmetric": (
        compressed(weight_args(8, "int", "channel", symmetric=False), "naive-quantized"),
        lambda w: int8(w, True),
    ),
    "ct_int8_packed": (compressed(weight_args(8, "int", "channel"), "pack-quantized"), packed8),
    "ct_int4_g16": _int4(16, False, torch.bfloat16),
    "ct_int4_g32": _int4(32, False, torch.bfloat16),
    "ct_int4_g64_asymmetric": _int4(64, True, torch.float16),
    "ct_int4_g128_f32": _int4(128, False, torch.float32),
    "ct_int4_channel": (
        compressed(weight_args(4, "int", "channel", group_size=-1), "pack-quantized"),
        lambda w: packed(w, w.shape[1], False, torch.bfloat16),
    ),
    "ct_mxfp4": (
        compressed(weight_args(4, "float", "group", group_size=32), "mxfp4-pack-quantized"),
        lambda w: mxfp4(w, ("weight_packed", "weight_scale")),
    ),
    "awq_g128": (AWQ | {"group_size": 128}, lambda w: awq(w, 128)),
    "awq_g64": (AWQ | {"group_size": 64}, lambda w: awq(w, 64)),
    "awq_g32": (AWQ | {"group_size": 32}, lambda w: awq(w, 32)),
    "gptq_v1": (GPTQ | {"group_size": 128, "sym": False}, lambda w: gptq(w, 128, True, 1)),
    "gptq_v1_symmetric": (GPTQ | {"group_size": 64, "sym": True}, lambda w: gptq(w, 64, False, 1)),
    "gptq_v2": (
        GPTQ | {"group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, 32, True, 0),
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, lambda w: mxfp4(w, ("weight_blocks", "weight_scales"))),
}


def checkpoint(name, folder, family="llama", sizes=None, wide=()):
    """Save case `name` in `folder`; a transformers model that holds the values, and them by stored name.

    `wide` are endings of modules that stay as they are, beside lm_head and the embedding.
    """
    config, store = CASES[name]
    sizes = sizes or (EDGES if "block" in name else SIZES)
    model = tiny.hf_model(family, seed=len(name), **sizes)
    state, stored, values = model.state_dict(), {}, {}
    for key, tensor in state.items():
        module = key.removesuffix(".weight")
        if not module.endswith(PROJECTIONS) or key.endswith("bias") or module.endswith(tuple(wide)):
            stored[key] = tensor
            continue
        one = store(tensor.double().numpy())
        stored |= {f"{module}.{suffix}": t for suffix, t in one.tensors.items()}
        values[key] = one.values
        tensor.copy_(one.values)
    tiny.save_folder(folder, json.loads(json.dumps(model.config.to_dict(), default=str)), stored)
    written = json.loads((folder / "config.json").read_text())
    written |= {"quantization_config": config, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(written))
    return model, values


def edit(folder, change):
    """Change quantization_config in place."""
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change):
    """Change the tensors of model.safetensors, a dictionary, in place."""
    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
