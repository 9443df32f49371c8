"""A random checkpoint that HIP's kernel takes, and a machine on which a test opens it: MI300Xs of a few CUs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kog_triton.backends.cuda import kernel_cache
from kog_triton.backends.hip import rank_selftest, selftest
from kog_triton.backends.hip.backend import HipBackend
from kog_triton.schedule.topology import GPUS
from tests.lib.compiled import FOLDER
from tests.lib.fake_hip import FakeHip
from tests.lib.tiny import save_folder

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "eos_token_id": 49,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}


def save_model(folder: Path, vocab_size: int = CONFIG["vocab_size"]) -> Path:
    g = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens.weight": (vocab_size, 64), "model.norm.weight": (64,)}
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (64,),
                "post_attention_layernorm": (64,),
                "self_attn.q_proj": (64, 64),
                "self_attn.k_proj": (32, 64),
                "self_attn.v_proj": (32, 64),
                "self_attn.o_proj": (64, 64),
                "mlp.gate_proj": (96, 64),
                "mlp.up_proj": (96, 64),
                "mlp.down_proj": (64, 96),
            }.items()
        }
    tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=g)
        value = 1 + 0.3 * value if len(shape) == 1 else value * 3 / shape[-1] ** 0.5
        tensors[name] = value.half()
    return save_folder(folder, CONFIG | {"vocab_size": vocab_size}, tensors)


def see(monkeypatch: Any, arch: str) -> None:
    """What torch says of the GPU."""
    monkeypatch.setattr(HipBackend, "_gpu_here", lambda: ("AMD Instinct", arch))


def install(fake: FakeHip, monkeypatch: Any, blocks: int) -> None:
    """The library, kernels kept where all tests keep them, and GPUs of so many CUs."""
    fake.install(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(FOLDER / "hip"))
    monkeypatch.setattr(kernel_cache, "_unwritten", {})
    see(monkeypatch, "gfx942")
    found = torch.device("cpu"), replace(GPUS["mi300x"], num_blocks=blocks)
    monkeypatch.setattr(HipBackend, "_find_gpus", staticmethod(lambda count=1: [found] * count))
    for module in (selftest, rank_selftest):
        monkeypatch.setattr(module, "ROUNDS", 3)
    # Kernels of columns are compiled where a test is about them.
    monkeypatch.setattr(HipBackend, "column_counts", ())
    monkeypatch.setattr(HipBackend, "chunk_positions", 0)
