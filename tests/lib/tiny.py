"""Random checkpoints of every family in a folder: small, of awkward sizes, with spread logits.

Hugging Face families are made and saved by transformers; a Laneformer is written tensor by tensor
in its own naming. Norm gains and biases are random, and logits deviate by 4 or more.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

VOCAB = 331


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def llama_tensors(dtype=torch.float32):
    """Every tensor of LLAMA by its name in a checkpoint."""
    g = torch.Generator().manual_seed(0)
    shapes = {
        "self_attn.q_proj": (12, 16),
        "self_attn.k_proj": (6, 16),
        "self_attn.v_proj": (6, 16),
        "self_attn.o_proj": (16, 12),
        "mlp.gate_proj": (24, 16),
        "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
        "input_layernorm": (16,),
        "post_attention_layernorm": (16,),
    }
    names = {f"model.layers.{i}.{n}.weight": s for i in range(2) for n, s in shapes.items()}
    names |= {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,)}
    names |= {"lm_head.weight": (40, 16)}
    return {n: torch.randn(s, generator=g).to(dtype) for n, s in names.items()}


def scatter(model, seed, spread=5.0):
    """Give a transformers model random weights whose logits deviate by about `spread`."""
    g = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5, generator=g)
            elif name.endswith("bias"):
                p.normal_(0, 0.5, generator=g)
            elif "embed" in name:
                p.normal_(0, spread / p.shape[1] ** 0.5 if tied else 1.0, generator=g)
            else:
                gain = spread if "lm_head" in name else 1.5
                p.normal_(0, gain / p.shape[1] ** 0.5, generator=g)
    return model.eval().float()


def hf_model(family, seed=0, **changes):
    """A random transformers model, float32, eager attention; `changes` go into its config."""
    import transformers

    sizes = {
        "vocab_size": VOCAB,
        "num_hidden_layers": 3,
        "intermediate_size": 176,
        "max_position_embeddings": 256,
        "attn_implementation": "eager",
    }
    # Awkward widths, 5 query heads a key/value head, head_dim other than hidden / heads.
    narrow = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
    fives = {"hidden_size": 120, "num_attention_heads": 10, "num_key_value_heads": 2}
    name, own = {
        "llama": ("Llama", fives | {"head_dim": 24}),
        "mistral": ("Mistral", narrow | {"head_dim": 32, "sliding_window": 7}),
        "qwen2": ("Qwen2", fives),
        "qwen3": ("Qwen3", {**narrow, "num_attention_heads": 5, "num_key_value_heads": 1} | {"head_dim": 32}),
    }[family]
    config = getattr(transformers, f"{name}Config")(**(sizes | own | changes))
    return scatter(getattr(transformers, f"{name}ForCausalLM")(config), seed)


def save_hf(model, folder, dtype=torch.float32, max_shard_size="5GB"):
    """Save with transformers in `dtype`; the model stays float32, its weights rounded alike."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.to(dtype))
    # Not model.to(dtype): that would round RoPE's frequencies as well.
    stored = {name: t.to(dtype) for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del stored["lm_head.weight"]
    model.config.dtype = dtype
    model.save_pretrained(folder, state_dict=stored, max_shard_size=max_shard_size)
    return Path(folder)


def laneformer_config(**changes):
    """A small Laneformer's config.json."""
    return {
        "model_type": "laneformer_tp",
        "architectures": ["LaneformerTPForCausalLM"],
        "hidden_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 176,
        "vocab_size": 336,
        "max_position_embeddings": 128,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_lanes": 4,
        "broadcast_delay": 2,
        "use_comm": True,
        "use_early_comm": True,
        "lm_head_type": "replicate",
        "pre_norm_lane_agg": False,
        "replicated_rmsn_scale": True,
        "sliding_window": 5,
        "sliding_window_n_layers": 2,
        "unclamped_layers": [],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    } | changes


def laneformer_tensors(config, seed=0):
    """Random tensors for a Laneformer's config, by their names in a checkpoint, float32."""
    g = torch.Generator().manual_seed(seed)
    lanes, hidden, vocab = config["num_lanes"], config["hidden_size"], config["vocab_size"]
    d = hidden // config["num_attention_heads"]
    q = config["num_attention_heads"] * d // lanes
    kv = config["num_key_value_heads"] * d // lanes
    ffn = config["intermediate_size"] // lanes

    def matrix(*shape, gain=1.5):
        return torch.randn(*shape, generator=g) * gain / shape[-1] ** 0.5

    def norm(name):
        if config["replicated_rmsn_scale"]:
            return {name + ".weight": torch.rand(hidden, generator=g) + 0.5}
        return {name + ".scale": torch.rand(lanes, hidden, generator=g) + 0.5}

    tied = config["tie_word_embeddings"]
    embed = torch.randn(vocab, hidden, generator=g) * (5 / hidden**0.5 if tied else 1.0)
    out = {"model.tok_embeddings.weight": embed} | norm("model.norm")
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out |= norm(p + "attention_norm") | norm(p + "ffn_norm")
        out[p + "attention.wq.weight"] = matrix(lanes, q, hidden)
        out[p + "attention.wk.weight"] = matrix(lanes, kv, hidden)
        out[p + "attention.wv.weight"] = matrix(lanes, kv, hidden)
        out[p + "attention.wo.weight"] = matrix(lanes, hidden, q)
        out[p + "feed_forward.w1.weight"] = matrix(lanes, ffn, hidden)
        out[p + "feed_forward.w3.weight"] = matrix(lanes, ffn, hidden)
        out[p + "feed_forward.w2.weight"] = matrix(lanes, hidden, ffn)
    spread = 14.0  # the mean over lanes that never meet keeps a third of it
    if config["lm_head_type"] == "lane":
        out["lm_head.linear.weight"] = matrix(vocab, lanes * hidden, gain=spread)
    elif config["lm_head_type"] == "vocab_parallel":
        out["lm_head.weight"] = matrix(lanes, vocab // lanes, hidden, gain=spread)
    elif not tied:
        out["lm_head.weight"] = matrix(vocab, hidden, gain=spread)
    return out


def save_folder(folder, config, tensors):
    """Write config.json and model.safetensors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def token_ids(count, vocab=VOCAB, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (count,), generator=g).tolist()


def write_json(path, value):
    path.write_text(json.dumps(value))


def shard(folder):
    """Split the checkpoint in `folder` over two files with an index; returns its weight_map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[:9], names[9:])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return weight_map
