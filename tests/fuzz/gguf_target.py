"""The target "gguf": a whole model in one file, attacked by its structure and by its bytes.

A file is taken apart into fields, tensors and data, damaged, and put together again: counts, lengths, types and offsets
that do not fit are what the reader must refuse before it allocates. A load is checked against a reading of its own.
"""

import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.text.gguf_tokenizer import tokenizer_of_gguf
from kog_triton.text.tokenizer import BYTE_OF

from .mutate import EDGES, damage_bytes, damage_text
from .targets import Target, use_tokenizer

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
COUNTS = (0, 1, 2, 3, 31, 33, 255, 2**16, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**63, 2**64 - 1)
VOCABULARY, HIDDEN = 40, 32
# names that a reader may know, as those of other files
TENSOR_NAMES = (b"lm_head.weight", b"output.weight", b"rope_freqs.weight", b"blk.0.attn_q.bias")
FIELD_NAMES = (b"split.count", b"general.type", b"tokenizer.chat_template.tool_use")
FIELD_NAMES += tuple(
    b"llama." + name for name in (b"rope.scaling.type", b"rope.scaling.factor", b"rope.scale_linear", b"expert_count")
)


@dataclass
class Text:
    """A string, which may lie about its length."""

    data: bytes
    length: int | None = None

    def pack(self) -> bytes:
        count = len(self.data) if self.length is None else self.length
        return struct.pack("<Q", count % 2**64) + self.data


@dataclass
class Value:
    """A metadata value; arrays have an inner type and may lie about their count."""

    kind: int
    value: Any
    inner: int = 0
    count: int | None = None

    def pack(self) -> bytes:
        head = struct.pack("<I", self.kind % 2**32)
        if isinstance(self.value, list):
            count = len(self.value) if self.count is None else self.count
            body = b"".join(_pack(self.inner, v) for v in self.value)
            return head + struct.pack("<IQ", self.inner % 2**32, count % 2**64) + body
        return head + _pack(self.kind, self.value)


def _pack(kind: int, value: Any) -> bytes:
    if isinstance(value, Text):
        return value.pack()
    if isinstance(value, bytes):
        return Text(value).pack()
    code = FORMATS.get(kind, "I")
    if code in "fd":
        return struct.pack("<" + code, float(value))
    if value != value:  # a NaN whose type was changed
        value = 0
    bits = 8 * struct.calcsize(code)
    low = -(2 ** (bits - 1)) if code.islower() else 0
    return struct.pack("<" + code, (int(value) - low) % 2**bits + low)


@dataclass
class Tensor:
    name: Text
    dims: list[int]
    kind: int
    offset: int
    rank: int | None = None

    def pack(self) -> bytes:
        rank = len(self.dims) if self.rank is None else self.rank
        dims = b"".join(struct.pack("<Q", d % 2**64) for d in self.dims)
        return (
            self.name.pack()
            + struct.pack("<I", rank % 2**32)
            + dims
            + struct.pack("<IQ", self.kind % 2**32, self.offset % 2**64)
        )


@dataclass
class File:
    fields: list[tuple[Text, Value]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    head: bytes = b"GGUF\x03\0\0\0"
    counts: tuple[int, int] | None = None

    def pack(self) -> bytes:
        counts = self.counts or (len(self.tensors), len(self.fields))
        out = self.head + struct.pack("<QQ", *(c % 2**64 for c in counts))
        out += b"".join(name.pack() + value.pack() for name, value in self.fields)
        out += b"".join(tensor.pack() for tensor in self.tensors)
        return out + bytes(-len(out) % 32) + self.data


def seed_file(architecture: str, kind: int) -> File:
    """A model of two layers whose matrices have one type, with a tokenizer."""
    draw = np.random.default_rng(kind)
    file = File()

    def add(name: str, how: int, value: Any, inner: int = 0) -> None:
        file.fields.append((Text(name.encode()), Value(how, value, inner)))

    add("general.architecture", STRING, architecture.encode())
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": HIDDEN}
    sizes |= {"feed_forward_length": HIDDEN, "attention.head_count": 2}
    sizes |= {"attention.head_count_kv": 1, "attention.key_length": 16}
    for name, size in sizes.items():
        add(f"{architecture}.{name}", 4, size)
    add(f"{architecture}.attention.layer_norm_rms_epsilon", 6, 1e-5)
    add(f"{architecture}.rope.freq_base", 6, 1e4)
    add("tokenizer.ggml.model", STRING, b"gpt2")
    add("tokenizer.ggml.pre", STRING, b"smollm" if architecture == "llama" else b"qwen2")
    tokens = [c.encode() for c in BYTE_OF] + [b"<|im_end|>", "\u0120a".encode(), b"<x>"]
    add("tokenizer.ggml.tokens", ARRAY, tokens, STRING)
    add("tokenizer.ggml.token_type", ARRAY, [1] * 256 + [3, 1, 4], 5)
    add("tokenizer.ggml.merges", ARRAY, ["\u0120 a".encode()], STRING)
    add("tokenizer.ggml.eos_token_id", 4, 7)
    add("tokenizer.ggml.add_bos_token", 7, 0)
    add("tokenizer.chat_template", STRING, b"{% for m in messages %}{{ m['content'] }}{% endfor %}")
    shapes = {"token_embd.weight": [HIDDEN, VOCABULARY], "output_norm.weight": [HIDDEN]}
    per_layer = {"attn_norm": [HIDDEN], "ffn_norm": [HIDDEN], "attn_q": [HIDDEN, 32]}
    per_layer |= {"attn_k": [HIDDEN, 16], "attn_v": [HIDDEN, 16], "attn_output": [32, HIDDEN]}
    per_layer |= {f"ffn_{n}": [HIDDEN, HIDDEN] for n in ("gate", "up", "down")}
    if architecture == "qwen3":
        per_layer |= {"attn_q_norm": [16], "attn_k_norm": [16]}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{n}.weight": s for n, s in per_layer.items()}
    for name, dims in shapes.items():
        stored = 0 if len(dims) == 1 else kind
        values = draw.normal(size=dims[::-1]).astype(np.float32)
        data = encode(values, stored)
        file.tensors.append(Tensor(Text(name.encode()), dims, stored, len(file.data)))
        file.data += data + bytes(-len(data) % 32)
    return file


def encode(values: np.ndarray, kind: int) -> bytes:
    """Blocks of F32 (0), F16 (1), Q4_0 (2) or Q8_0 (8)."""
    if kind == 0:
        return values.tobytes()
    if kind == 1:
        return values.astype(np.float16).tobytes()
    blocks = values.reshape(-1, 32)
    half = 7 if kind == 2 else 127
    scales = (np.abs(blocks).max(1, keepdims=True) / half).astype(np.float16)
    codes = np.clip(np.round(blocks / scales.astype(np.float32)), -half, half).astype(np.int8)
    if kind == 2:
        nibbles = (codes + 8).astype(np.uint8)
        codes = nibbles[:, :16] | nibbles[:, 16:] << 4
    return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], 1).tobytes()


class Gguf(Target):
    """A GGUF file: its directory, its tensors, its tokenizer."""

    limit = 7.0  # it may bring a chat template, which may take 5 s

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = [seed_file(a, k) for a in ("llama", "qwen3") for k in (0, 1, 2, 8)]
        self.seeds = [file.pack() for file in self.files]
        for data in self.seeds:
            assert self.run(data)

    def case(self, draw: Random) -> bytes:
        kind = draw.random()
        if kind < 0.01:
            return bytes(draw.randrange(256) for _ in range(draw.randrange(200)))
        file = draw.choice(self.files)
        if kind < 0.35:
            whole = file.pack()
            return damage_bytes(draw, whole, reach=len(whole) - len(file.data))
        file = replace(file, fields=list(file.fields), tensors=list(file.tensors))
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            self._change(draw, file)
        return file.pack()

    def _change(self, draw: Random, file: File) -> None:
        edit = draw.randrange(12)
        if edit == 0:
            counts = [len(file.tensors), len(file.fields)]
            counts[draw.randrange(2)] = draw.choice(COUNTS)
            file.counts = (counts[0], counts[1])
        elif edit == 1:
            cut = draw.randrange(len(file.data) + 1)
            file.data = draw.choice((file.data[:cut], file.data + file.data, b""))
        elif edit == 2:
            at = draw.randrange(len(file.data)) if file.data else 0
            file.data = file.data[:at] + damage_bytes(draw, file.data[at : at + 64]) + file.data[at + 64 :]
        elif edit <= 7 and file.fields:
            i = draw.randrange(len(file.fields))
            file.fields[i] = self._field(draw, *file.fields[i])
            if draw.random() < 0.1:
                del file.fields[i]
            elif draw.random() < 0.1:
                file.fields.append(draw.choice(file.fields))
        elif file.tensors:
            i = draw.randrange(len(file.tensors))
            file.tensors[i] = self._tensor(draw, file, file.tensors[i])
            if draw.random() < 0.1:
                del file.tensors[i]
            elif draw.random() < 0.1:
                more = replace(draw.choice(file.tensors), name=Text(draw.choice(TENSOR_NAMES)))
                file.tensors.append(more)

    def _field(self, draw: Random, name: Text, value: Value) -> tuple[Text, Value]:
        edit = draw.randrange(6)
        if edit == 0:
            known = draw.random() < 0.3
            return Text(draw.choice(FIELD_NAMES)) if known else self._text(draw, name), value
        if edit == 1:
            return name, replace(value, kind=draw.choice((*range(14), 2**32 - 1)))
        if isinstance(value.value, list):
            if edit == 2:
                return name, replace(value, count=draw.choice(COUNTS))
            if edit == 3:
                return name, replace(value, inner=draw.choice((*range(14), 2**31)))
            items = list(value.value) or [b""]
            i = draw.randrange(len(items))
            old = items[i]
            if isinstance(old, bytes):
                items[i] = draw.choice((self._text(draw, Text(old)), draw.choice(items), b""))
            else:
                items[i] = draw.choice(COUNTS)
            return name, replace(value, value=items[: draw.choice((i, len(items), len(items)))])
        if isinstance(value.value, bytes | Text):
            old = value.value if isinstance(value.value, Text) else Text(value.value)
            return name, replace(value, value=self._text(draw, old))
        more = (float("nan"), 1e38, -1e-38) if value.kind in (6, 12) else (-1,)
        number = draw.choice((*COUNTS, value.value + 1, value.value * 2, *more))
        return name, replace(value, value=number)

    def _text(self, draw: Random, text: Text) -> Text:
        if draw.random() < 0.3:
            return Text(text.data, draw.choice((*COUNTS, len(text.data) + 1, len(text.data) - 1)))
        if draw.random() < 0.5:
            return Text(damage_bytes(draw, text.data))
        pieces = [e for e in EDGES if isinstance(e, str)]
        said = damage_text(draw, text.data.decode(errors="replace"), pieces)
        return Text(said.encode("utf-8", "surrogatepass"))

    def _tensor(self, draw: Random, file: File, tensor: Tensor) -> Tensor:
        edit = draw.randrange(6)
        if edit == 0:
            known = draw.random() < 0.3
            name = Text(draw.choice(TENSOR_NAMES)) if known else self._text(draw, tensor.name)
            return replace(tensor, name=name)
        if edit == 1:
            return replace(tensor, rank=draw.choice((0, 1, 2, 3, 4, 5, 2**31, 2**32 - 1)))
        if edit == 2:
            dims = list(tensor.dims)
            dims[draw.randrange(len(dims))] = draw.choice((*COUNTS, HIDDEN, 64))
            return replace(tensor, dims=dims)
        if edit == 3:
            return replace(tensor, kind=draw.choice((*range(40), 2**32 - 1)))
        other = draw.choice(file.tensors)
        offsets = (*COUNTS, other.offset, tensor.offset + 32, len(file.data), 2**64 - 32)
        return replace(tensor, offset=draw.choice(offsets))

    def load(self, data: bytes) -> None:
        path = self.folder / "model.gguf"
        path.write_bytes(data)
        checkpoint = Checkpoint.open(path)
        places = read_places(data)
        for name in checkpoint.names():
            dims, kind, first = places[_stored_name(name)]
            got = np.sort(checkpoint.load(name).float().numpy().ravel())
            want = np.sort(decode(data, dims, kind, first))
            assert np.array_equal(got, want, equal_nan=True), f"{name} is not what the file holds"
        assert checkpoint.metadata is not None
        use_tokenizer(tokenizer_of_gguf(checkpoint.metadata, path))


def read_places(data: bytes) -> dict[str, tuple[list[int], int, int]]:
    """(dimensions, type, first byte) of every tensor of a file that loaded: no checks."""
    at = 24
    tensors, fields = struct.unpack_from("<QQ", data, 8)
    alignment = 32

    def take(code: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> bytes:
        nonlocal at
        length = take("Q")
        at += length
        return data[at - length : at]

    def one(kind: int) -> Any:
        return text() if kind == STRING else take(FORMATS[kind])

    for _ in range(fields):
        name, kind = text(), take("I")
        if kind == ARRAY:
            inner, count = take("I"), take("Q")
            for _ in range(count):
                one(inner)
        else:
            value = one(kind)
            alignment = value if name == b"general.alignment" else alignment
    found = []
    for _ in range(tensors):
        name, rank = text(), take("I")
        found.append((name, [take("Q") for _ in range(rank)], take("I"), take("Q")))
    start = -(-at // alignment) * alignment
    return {n.decode(): (dims, kind, start + offset) for n, dims, kind, offset in found}


def decode(data: bytes, dims: list[int], kind: int, first: int) -> np.ndarray:
    """A tensor's values in the file's order, float32; types that a seed has, or that damage makes of them."""
    count = int(np.prod(dims))
    if kind in (0, 1):
        stored = np.frombuffer(data, np.float32 if kind == 0 else np.float16, count, first)
        return stored.astype(np.float32)
    if kind == 30:
        halves = np.frombuffer(data, np.uint16, count, first).astype(np.uint32)
        return (halves << 16).view(np.float32)
    size = {2: 18, 3: 20, 8: 34}.get(kind)
    if size is None:
        import gguf

        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        raw = np.frombuffer(data, np.uint8, count // block * size, first)
        values = gguf.dequantize(raw, gguf.GGMLQuantizationType(kind))
        return values.astype(np.float16).astype(np.float32).ravel()
    raw = np.frombuffer(data, np.uint8, count // 32 * size, first).reshape(-1, size)
    scale = raw[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == 8:
        return (raw[:, 2:].view(np.int8) * scale).ravel()
    codes = np.concatenate([raw[:, -16:] & 15, raw[:, -16:] >> 4], 1).astype(np.float32)
    if kind == 2:
        return ((codes - 8) * scale).ravel()
    return (codes * scale + raw[:, 2:4].copy().view(np.float16).astype(np.float32)).ravel()


def _stored_name(name: str) -> str:
    fixed = {"embed": "token_embd", "norm": "output_norm", "lm_head": "output"}
    if name in fixed:
        return f"{fixed[name]}.weight"
    _, layer, part = name.split(".")
    names = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm", "o_proj": "attn_output"}
    names |= {f"{n}_proj": f"attn_{n}" for n in "qkv"} | {f"{n}_norm": f"attn_{n}_norm" for n in "qk"}
    names |= {f"{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}
    return f"blk.{layer}.{names[part]}.weight"
