"""What is attacked: one class a kind of file, each with seeds, a way to damage them and a check.

    target = TARGETS["index"](folder)         an empty folder to work in (table.py)
    data = target.case(Random(1))             the bytes of one case
    target.run(data)                          a KogError, or a checked load; else a fault

`run` checks a load against a reading that shares no code with the loader. A `KogError` must be one
printable line of bounded length: `refused` says so.
"""

import json
import math
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.errors import KogError, ModelError
from kog_triton.model.families import read_spec, sources
from kog_triton.model.generation import read_generation
from kog_triton.text import Detokenizer, Tokenizer
from tests.lib import fake_checkpoint, text_samples, tiny

from .mutate import damage_bytes, damage_json, dump

MAX_MESSAGE = 1000
SIZES = {"F32": 4, "F16": 2, "BF16": 2}


def refused(error: KogError) -> None:
    """What every refusal must look like."""
    text = str(error)
    assert text and len(text) < MAX_MESSAGE, f"a message of {len(text)} characters"
    assert len(text.splitlines()) == 1, "a message of several lines"
    assert text.isprintable(), "a message that could drive a terminal"


class Target:
    """`limit` is how many seconds one case may take."""

    limit = 2.0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seeds: list[bytes] = []
        self.donors: list[Any] = []

    def case(self, draw: Random) -> bytes:
        if draw.random() < 0.01:
            return bytes(draw.randrange(256) for _ in range(draw.randrange(200)))
        return self.damage(draw, draw.choice(self.seeds))

    def damage(self, draw: Random, data: bytes) -> bytes:
        """Structure first; where `data` is no JSON any more, bytes."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return damage_bytes(draw, data)
        return dump(draw, damage_json(draw, value, self.donors))

    def run(self, data: bytes) -> bool:
        """Whether the case loaded; a refusal is checked, and whatever else comes escapes."""
        try:
            self.load(data)
        except KogError as error:
            refused(error)
            return False
        return True

    def load(self, data: bytes) -> None:
        raise NotImplementedError

    def take(self, *values: Any) -> None:
        self.donors = list(values)
        self.seeds = [json.dumps(value).encode() for value in values]


class Header(Target):
    """The first bytes of model.safetensors."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for dtype in (torch.float32, torch.bfloat16):
            tiny.save_folder(folder, tiny.LLAMA, tiny.llama_tensors(dtype))
            raw = (folder / "model.safetensors").read_bytes()
            self.seeds.append(raw)
            self.donors.append(json.loads(raw[8 : 8 + _header_length(raw)]))

    def damage(self, draw: Random, data: bytes) -> bytes:
        end = 8 + _header_length(data)
        if draw.random() < 0.3:
            return damage_bytes(draw, data, reach=end)
        try:
            header = damage_json(draw, json.loads(data[8:end]), self.donors)
        except (ValueError, RecursionError):
            return damage_bytes(draw, data, reach=64)
        text = dump(draw, header)
        length = len(text) if draw.random() < 0.9 else draw.choice((0, 1, 2**32, 2**63, 2**64 - 1))
        return struct.pack("<Q", length) + text + data[end:]

    def load(self, data: bytes) -> None:
        (self.folder / "model.safetensors").write_bytes(data)
        checkpoint = Checkpoint.open(self.folder)
        end = 8 + _header_length(data)
        header = json.loads(data[8:end])
        for name in checkpoint.names():
            stored = header[_stored_name(name)]
            first, last = stored["data_offsets"]
            tensor = checkpoint.load(name)
            assert tensor.numel() * SIZES[stored["dtype"]] == last - first
            want = np.frombuffer(data[end + first : end + last], np.uint8)
            got = tensor.contiguous().view(torch.uint8).flatten().numpy()
            assert np.array_equal(got, want), f"{name} has other bytes than the file"


class Index(Target):
    """model.safetensors.index.json."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tiny.save_folder(folder, tiny.LLAMA, tiny.llama_tensors())
        self.want = _sorted_values(tiny.llama_tensors().values())
        weight_map = tiny.shard(folder)
        full = {"metadata": {"total_size": 9000}, "weight_map": weight_map}
        self.take({"weight_map": weight_map}, full)

    def load(self, data: bytes) -> None:
        (self.folder / "model.safetensors.index.json").write_bytes(data)
        checkpoint = Checkpoint.open(self.folder)
        loaded = [checkpoint.load(name) for name in checkpoint.names()]
        assert torch.equal(_sorted_values(loaded), self.want)


class Config(Index):
    """config.json: with a llama's weights beside it, and of every family alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        lanes = tiny.laneformer_config()
        llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
        yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.3, "mscale_all_dim": 0.7}
        others = [
            tiny.LLAMA | {"rope_theta": 1e4, "rope_scaling": llama3, "torch_dtype": "float32"},
            tiny.LLAMA | {"rope_parameters": yarn | {"rope_theta": 1e6}, "dtype": "bfloat16"},
            tiny.LLAMA | {"model_type": "mistral", "sliding_window": 7},
            tiny.LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
            tiny.LLAMA | {"model_type": "qwen3", "layer_types": ["full_attention"] * 2},
            lanes | {"rope_scaling": llama3},
        ]
        for other in others:
            if other["model_type"] != "laneformer_tp":
                name = str(other["model_type"]).capitalize()
                other["architectures"] = [f"{name}ForCausalLM"]
        self.take(tiny.LLAMA, tiny.LLAMA | {"attention_bias": False}, lanes, *others)

    def load(self, data: bytes) -> None:
        (self.folder / "config.json").write_bytes(data)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            try:
                spec = read_spec(value)
                assert set(sources(spec)) == set(spec.shapes)
            except ModelError as error:
                refused(error)
        checkpoint = Checkpoint.open(self.folder)
        loaded = [checkpoint.load(name) for name in checkpoint.names()]
        assert torch.equal(_sorted_values(loaded), self.want)


class Generation(Target):
    """generation_config.json: what is read is what the file says, in its range."""

    vocab_size = 40
    ranges = {  # noqa: RUF012
        "temperature": (0, 100),
        "top_k": (0, 2**31),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (1e-3, 100),
        "max_new_tokens": (1, 2**31),
        "bos_token_id": (0, vocab_size - 1),
    }

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        tiny.save_folder(folder, tiny.LLAMA, tiny.llama_tensors())
        full = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
        full |= {"repetition_penalty": 1.1, "max_new_tokens": 100, "bos_token_id": 1}
        self.take({"eos_token_id": 2}, full | {"eos_token_id": [2, 3]}, full)

    def load(self, data: bytes) -> None:
        (self.folder / "generation_config.json").write_bytes(data)
        checkpoint = Checkpoint.open(self.folder)
        said = json.loads(data)
        for name, value in checkpoint.generation.items():
            if name == "eos_token_id":
                ids = said[name] if isinstance(said[name], list) else [said[name]]
                assert list(value) == list(dict.fromkeys(ids))
                assert all(0 <= i < self.vocab_size for i in value)
            else:
                assert value == said[name]
                low, high = self.ranges.get(name, (False, True))
                assert math.isfinite(value) and low <= value <= high
        assert read_generation(said, self.vocab_size, "x") == checkpoint.generation


class TokenizerFile(Target):
    """tokenizer.json: what loads also encodes, decodes and streams."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        kinds = [k for k in text_samples.KINDS if k != "metaspace"]
        texts = [_smaller(text_samples.make_tokenizer(kind).to_str()) for kind in kinds]
        self.take(*(json.loads(text) for text in texts))
        double = {"type": "Replace", "pattern": {"String": "l"}, "content": "ll"}
        self.donors.append({"normalizer": {"type": "Sequence", "normalizers": [double] * 40}})

    def load(self, data: bytes) -> None:
        (self.folder / "tokenizer.json").write_bytes(data)
        use_tokenizer(Tokenizer.load(self.folder))


class TokenizerConfig(Target):
    """tokenizer_config.json beside a good tokenizer.json."""

    limit = 7.0  # a chat template may take 5 s

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        fake_checkpoint.byte_tokenizer().save(str(folder / "tokenizer.json"))
        token = {"content": "<x>", "lstrip": False, "normalized": False, "rstrip": False}
        token |= {"single_word": False, "special": True}
        chat = fake_checkpoint.CHAT_TEMPLATE
        self.take(
            {"eos_token": "<end>", "chat_template": chat},
            {"bos_token": {"content": "<a>"}, "chat_template": [{"name": "x", "template": chat}]},
            {"added_tokens_decoder": {"260": token, "261": token | {"content": "<y>"}}},
            {"extra_special_tokens": ["<u>", token], "additional_special_tokens": ["<v>"]},
        )

    def load(self, data: bytes) -> None:
        (self.folder / "tokenizer_config.json").write_bytes(data)
        use_tokenizer(Tokenizer.load(self.folder))


SAID = "Hello <|im_end|> wörld 😀  <0x41> <end>\n"


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """All that an engine does with a tokenizer, checked where two ways must agree."""
    ids = tokenizer.encode(SAID)
    assert all(type(i) is int and 0 <= i < 2**32 for i in ids)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    stream = Detokenizer(tokenizer, skip_special_tokens=False)
    assert isinstance(text, str)
    assert isinstance("".join([*(stream.feed(i) for i in ids), stream.finish()]), str)
    for token in (0, 5, 70, 300, tokenizer.vocab_size, 2**32 - 1):
        piece = tokenizer.token_bytes(token)
        assert piece is None or isinstance(piece, bytes)
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": SAID}])


def _smaller(text: str) -> str:
    """Fewer pieces make shorter cases, in which the parts that matter are hit more often."""
    data = json.loads(text)
    model = data["model"]
    if isinstance(model["vocab"], dict):
        added = {token["content"] for token in data["added_tokens"]}
        order = sorted(model["vocab"].items(), key=lambda item: item[1])
        kept = [piece for piece, i in order if i < 300 or piece in added]
        model["vocab"] = {piece: model["vocab"][piece] for piece in kept}
        if "merges" in model:
            have = model["vocab"]
            model["merges"] = [m for m in model["merges"] if "".join(m) in have][:20]
    return json.dumps(data)


def _header_length(data: bytes) -> int:
    length = int.from_bytes(data[:8], "little")
    return min(length, max(0, len(data) - 8))


def _stored_name(name: str) -> str:
    """The name in a llama's file of a canonical name."""
    fixed = {"embed": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}
    fixed |= {"norm": "model.norm.weight"}
    if name in fixed:
        return fixed[name]
    _, layer, part = name.split(".")
    group = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn"}
    group |= {"o_proj": "self_attn", "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp"}
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    inner = f"{group[part]}.{part}" if part in group else norms[part]
    return f"model.layers.{layer}.{inner}.weight"


def _sorted_values(tensors: Any) -> torch.Tensor:
    return torch.cat([t.flatten().double() for t in tensors]).sort().values
