"""GGUF files written by the gguf package from transformers models, with the names that it gives to tensors.

Weights of Q8_0, Q4_0 and Q4_1 are quantized by the package; blocks of other types are random bits with small scales.
The values they stand for come from transformers' own code for them, not from the package's that the loader asks.
"""

import json

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from packaging import version
from transformers.integrations.gguf import dequant

from tests.lib import tiny

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}
_ARCHITECTURE = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
# where the F16 scales of a block lie
_SCALES = {
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def blocks(w, kind):
    """(bytes [rows, bytes of a row], values float32) of a matrix in a type."""
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        stored = w.to(dtype)
        data = stored.view(torch.int16).numpy() if kind == "BF16" else stored.numpy()
        return data, stored.float()
    if kind in ("Q8_0", "Q4_0", "Q4_1"):
        data = gguf.quantize(w.numpy(), Kind[kind])
        return data, dequant.dequantize(torch.from_numpy(data), Kind[kind].value).reshape(w.shape)
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rows, cols = w.shape
    g = np.random.default_rng(rows + cols)
    data = g.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    spread = {"Q2_K": 0.004, "Q3_K": 0.001, "Q4_K": 1e-4, "Q5_K": 1e-4, "Q6_K": 2e-5}.get(kind, 5e-3)
    for at in _SCALES[kind]:
        scales = g.uniform(spread, 2 * spread, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    data = data.reshape(rows, -1)
    values = unpacked(data, kind).reshape(w.shape)
    return data, values.half().float()


def unpacked(data, kind):
    """By transformers' code, which has no Q5_0 and Q5_1: those by ggml's formula."""
    if kind in ("Q4_0", "Q4_1") and version.parse(transformers.__version__) < version.parse("5.23"):
        return torch.from_numpy(gguf.dequantize(data, Kind[kind]))  # not known to 5.17; the loader has code of its own
    if kind not in ("Q5_0", "Q5_1"):
        return dequant.dequantize(torch.from_numpy(data), Kind[kind].value)
    size = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    parts = data.reshape(-1, size)
    head = 2 if kind == "Q5_0" else 4
    scale = parts[:, :2].copy().view(np.float16).astype(np.float32)
    high = parts[:, head : head + 4].copy().view(np.uint32)
    low = parts[:, head + 4 :]
    codes = np.concatenate([low & 15, low >> 4], 1) | ((high >> np.arange(32, dtype=np.uint32) & 1) << 4)
    if kind == "Q5_0":
        return torch.from_numpy((codes.astype(np.float32) - 16) * scale)
    minimum = parts[:, 2:4].copy().view(np.float16).astype(np.float32)
    return torch.from_numpy(codes.astype(np.float32) * scale + minimum)


def interleave(w, heads):
    """llama.cpp's order of Llama's query and key rows."""
    return w.reshape(heads, 2, -1, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write(path, kind="Q8_0", family="llama", embed_kind="F16", text=None, **changes):
    """Write a model to `path`; the transformers model holds the values that the file stands for.

    `text` writes a tokenizer: a function of the writer.
    """
    model = tiny.hf_model(family, seed=3, **(SIZES | changes))
    config = model.config
    architecture = gguf.MODEL_ARCH[_ARCHITECTURE[family]]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 64)
    writer.add_value_length(config.head_dim if hasattr(config, "head_dim") else 64)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if family == "mistral" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] == "llama3":
        divisors = 1 / (model.model.rotary_emb.inv_freq * rope["rope_theta"] ** (torch.arange(32) / 32))
        writer.add_tensor("rope_freqs.weight", divisors.numpy().astype(np.float32))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if text is not None:
        text(writer)
    values = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            part = name.split(".")[-2]
            swap = architecture is gguf.MODEL_ARCH.LLAMA and part in heads
            if tensor.ndim == 1:
                stored = interleave(tensor, heads[part]) if swap else tensor
                writer.add_tensor(ours, stored.numpy())
                continue
            one = embed_kind if name in ("model.embed_tokens.weight", "lm_head.weight") else kind
            w = interleave(tensor, heads[part]) if swap else tensor
            data, known = blocks(w.contiguous(), one)
            writer.add_tensor(ours, data, raw_dtype=Kind[one])
            if swap:
                known = known.reshape(heads[part], -1, 2, known.shape[1]).swapaxes(1, 2)
            tensor.copy_(known.reshape(tensor.shape))
            values[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, values


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def byte_level_text(tokenizer, pre="smollm"):
    """Write a byte-level tokenizer (of the tokenizers library) as llama.cpp's converter does."""

    def write_text(writer):
        data = json.loads(tokenizer.to_str())
        added = {t["id"]: t for t in data["added_tokens"]}
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        tokens = sorted(vocabulary, key=vocabulary.get)
        kinds = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(tokens))]
        merges = [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(merges)
        writer.add_chat_template(TEMPLATE)
        if "<|im_end|>" in vocabulary:
            writer.add_eos_token_id(vocabulary["<|im_end|>"])

    return write_text


def sentencepiece_text(tokens, scores, kinds, **flags):
    """Write SentencePiece's pieces as llama.cpp's converter does."""

    def write_text(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(kinds)
        for name in ("unk", "bos", "eos"):
            getattr(writer, f"add_{name}_token_id")(("unk", "bos", "eos").index(name))
        for name, value in flags.items():
            getattr(writer, f"add_{name}")(value)

    return write_text
