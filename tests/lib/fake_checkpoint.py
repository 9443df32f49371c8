"""A checkpoint small enough to write in a test: a random one-layer Llama and a byte tokenizer.

Id = byte for 0..255, then END and three ids that are no text.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END = 256
VOCAB_SIZE = END + 4
MAX_CONTEXT = 512


def make_checkpoint(folder: Path, max_context: int = MAX_CONTEXT, **generation: Any) -> Path:
    """A one-layer Llama of random weights with a byte tokenizer: something that opens."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden, ffn, vocab = 8, 16, VOCAB_SIZE
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": vocab,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END} | generation))
    torch.manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.post_attention_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_proj.weight": (16, hidden),
        "model.layers.0.self_attn.k_proj.weight": (8, hidden),
        "model.layers.0.self_attn.v_proj.weight": (8, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, 16),
        "model.layers.0.mlp.gate_proj.weight": (ffn, hidden),
        "model.layers.0.mlp.up_proj.weight": (ffn, hidden),
        "model.layers.0.mlp.down_proj.weight": (hidden, ffn),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if thinking %}<think>\n{% endif %}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    vocab = {sign: byte for byte, sign in enumerate(bytes_to_signs())}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<a>", "<b>", "<c>"])
    return tokenizer


def bytes_to_signs() -> list[str]:
    """What a byte-level BPE writes for each byte: itself, or from U+0100 on if unprintable."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    out, free = [], 256
    for byte in range(256):
        out.append(chr(byte) if byte in printable else chr(free))
        free += byte not in printable
    return out
