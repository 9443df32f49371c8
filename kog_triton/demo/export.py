"""Writes a trained run as a float16 checkpoint folder that engines load.

    python -m kog_triton.demo.export --data DIR --run DIR --out DIR

A delayed model becomes a Laneformer checkpoint; its blocking twin becomes an ordinary Llama
checkpoint as transformers reads it. Shards stay below MAX_SHARD_BYTES; the tokenizer goes along.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kog_triton.demo.model import Shape
from kog_triton.demo.train import newest
from kog_triton.errors import ModelError
from kog_triton.json_file import in_lines

MAX_SHARD_BYTES = 14_000_000
TEMPERATURE, TOP_P = 0.7, 0.95  # what generation_config.json suggests

LLAMA_NAMES = {
    "attention.wo": "self_attn.o_proj",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "tok_embeddings": "embed_tokens",
}


def laneformer_config(shape: Shape) -> dict[str, object]:
    """config.json of a Laneformer checkpoint."""
    return {
        "architectures": ["LaneformerForCausalLM"],
        "model_type": "laneformer",
        **_sizes(shape),
        "norm_eps": shape.norm_eps,
        "num_lanes": shape.num_lanes,
        "broadcast_delay": shape.delay,
        "use_comm": True,
        "use_early_comm": False,
        "lm_head_type": "replicate",
        "pre_norm_lane_agg": False,
        "replicated_rmsn_scale": True,
        "sliding_window": None,
    }


def llama_config(shape: Shape) -> dict[str, object]:
    """config.json of the twin for transformers' LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_sizes(shape),
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _sizes(shape: Shape) -> dict[str, object]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float16",
    }


def llama_tensors(tensors: dict[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """The one-lane tensors under Llama's names, rotary pairs (2k, 2k+1) moved to (k, k + d/2)."""
    renamed = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 3:
            tensor = tensor.squeeze(0)
        if ".wq." in name or ".wk." in name:
            pairs = tensor.unflatten(0, (num_heads, -1, 2))  # [heads, head_dim / 2, 2, D]
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        for old, new in LLAMA_NAMES.items():
            name = name.replace(f"{old}.", f"{new}.")
        renamed[name] = tensor
    return renamed


def from_llama_tensors(tensors: dict[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """The inverse of llama_tensors: what the training model of the twin loads."""
    renamed = {}
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.unflatten(0, (num_heads, 2, -1))
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if "_proj" in name:
            tensor = tensor.unsqueeze(0)
        for old, new in LLAMA_NAMES.items():
            name = name.replace(f"{new}.", f"{old}.")
        renamed[name] = tensor
    return renamed


def save_sharded(tensors: dict[str, Tensor], out: Path, limit: int = MAX_SHARD_BYTES) -> None:
    """Write model-i-of-n.safetensors, each of at most `limit` bytes of data, and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors.items():
        if tensor.nbytes > limit:
            raise ModelError(f"{name} has {tensor.nbytes} bytes, more than a shard of {limit}")
        if used + tensor.nbytes > limit:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.nbytes
    weight_map: dict[str, str] = {}
    for shard_idx, shard in enumerate(shards):
        file = f"model-{shard_idx + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(in_lines(index, 1) + "\n")


def load_checkpoint(folder: Path) -> tuple[Shape, dict[str, Tensor]]:
    """The shape and the tensors (under training names) of a folder that export() wrote."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; write it with kog_triton.demo.export")
    config = json.loads((folder / "config.json").read_text())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        tensors |= load_file(folder / file)
    delayed = config["model_type"] == "laneformer"
    shape = Shape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        intermediate_size=config["intermediate_size"],
        num_lanes=config["num_lanes"] if delayed else 1,
        delay=config["broadcast_delay"] if delayed else Shape.delay,
        reduce="delayed" if delayed else "blocking",
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["norm_eps" if delayed else "rms_norm_eps"],
    )
    return shape, tensors if delayed else from_llama_tensors(tensors, shape.num_heads)


def export(run: Path, data: Path, out: Path, limit: int = MAX_SHARD_BYTES) -> None:
    """Write the newest weights of `run` to `out` in shards of at most `limit` bytes of data.

    ModelError if float16 cannot hold them.
    """
    folder = newest(run)
    shape = Shape(**json.loads((folder / "state.json").read_text())["shape"])
    tensors = {name: t.half() for name, t in load_file(folder / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{name} does not fit float16; train with a lower rate")
    if shape.reduce == "blocking":
        if shape.num_lanes != 1:
            raise ModelError("a Llama checkpoint is written from one lane; train with --twin")
        config, tensors = llama_config(shape), llama_tensors(tensors, shape.num_heads)
    else:
        config = laneformer_config(shape)
    out.mkdir(parents=True, exist_ok=True)
    save_sharded({name: t.contiguous() for name, t in tensors.items()}, out, limit)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": True, "temperature": TEMPERATURE, "top_p": TOP_P}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Export a trained run as a checkpoint folder")
    parser.add_argument("--data", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--run", type=Path, required=True, help="folder that train.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    arguments = parser.parse_args()
    export(arguments.run, arguments.data, arguments.out)


if __name__ == "__main__":
    main()
