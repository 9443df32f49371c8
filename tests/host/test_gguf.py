"""GGUF files: the gguf package writes them, transformers' code says what their blocks stand for."""

import re
import resource
import struct
import sys

import gguf
import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.gguf import file
from kog_triton.checkpoint.gguf.file import TYPES, Directory
from kog_triton.errors import ModelError
from kog_triton.model.spec import DType, RopeScaling
from tests.lib import gguf_cases, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
LOGITS = 1e-5  # relative error of the reference's logits
KINDS = ["Q8_0", "Q4_0", "Q4_1", "F32", "F16", "BF16"]
UNPACKED = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1"]


def canonical(stored):
    """ "layers.0.q_proj" of "model.layers.0.self_attn.q_proj.weight"."""
    parts = stored.split(".")
    return f"layers.{parts[2]}.{parts[-2]}" if "layers" in parts else {"lm_head": "lm_head"}.get(parts[0], "embed")


def assert_same(path, model, values):
    checkpoint = Checkpoint.open(path)
    for stored, want in values.items():
        got = checkpoint.load(canonical(stored))
        assert torch.equal(got.float().reshape(want.shape), want), stored
    ids = tiny.token_ids(30, model.config.vocab_size)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].double()
    got = ReferenceBackend(checkpoint, BackendOptions()).forward_logits(ids)
    assert want.std() >= 2
    assert (torch.from_numpy(got).double() - want).norm() / want.norm() <= LOGITS
    return checkpoint


@pytest.mark.parametrize("kind", [*KINDS, *UNPACKED])
def test_values_and_logits_of_every_type(kind, tmp_path):
    path = tmp_path / "model.gguf"
    checkpoint = assert_same(path, *gguf_cases.write(path, kind))
    narrow = kind in ("Q8_0", "Q4_0", "Q4_1")
    assert len(checkpoint.spec.narrow) == (14 if narrow else 0)
    if kind in UNPACKED:
        assert checkpoint.notes == (f"{kind} weights are unpacked to 16 bits (F16)",)
        assert checkpoint.load("layers.1.up_proj").dtype is torch.float16
    else:
        assert checkpoint.notes == ()


SCALINGS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 8192},
    "linear": {"factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        *(
            ("llama", {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5} | more})
            for kind, more in (*SCALINGS.items(), ("llama3", SCALINGS["llama3"] | {"factor": 1.5}))
        ),
    ],
)
def test_families(family, changes, tmp_path):
    path = tmp_path / "model.gguf"
    model, values = gguf_cases.write(path, "Q4_1", family, "Q8_0", **changes)
    spec = assert_same(path, model, values).spec
    assert spec.family == family and spec.tied_embeddings is changes.get("tie_word_embeddings", False)
    kind = changes.get("rope_parameters", {}).get("rope_type", "none")
    assert spec.rope.scaling is RopeScaling[kind.upper()]
    assert dict(spec.narrow)["embed"].name == "int8 g32" and spec.dtype is DType.F16


def fields(values, absent=()):
    """A function of the writer: these fields as they are, those left out."""

    def write(writer):
        for name in (*values, *absent):
            writer.kv_data[0].pop(name, None)
        for name, value in values.items():
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))

    return write


@pytest.mark.parametrize("name", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_rope_factor_without_a_type_is_linear(name, tmp_path):
    """As in llama.cpp, whose older files have no type and the second name."""
    path = tmp_path / "model.gguf"
    text = fields({f"llama.{name}": 2.5}, absent=("llama.rope.scaling.type", "llama.rope.scaling.factor"))
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.5}
    model, values = gguf_cases.write(path, text=text, rope_parameters=rope)
    spec = assert_same(path, model, values).spec
    assert spec.rope.scaling is RopeScaling.LINEAR and spec.rope.factor == 2.5


def test_betas_of_yarn(tmp_path):
    path = tmp_path / "model.gguf"
    text = fields({"llama.rope.scaling.yarn_beta_fast": 8.0, "llama.rope.scaling.yarn_beta_slow": 2.0})
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "beta_fast": 8.0, "beta_slow": 2.0}
    model, values = gguf_cases.write(path, text=text, rope_parameters=rope | SCALINGS["yarn"])
    assert assert_same(path, model, values).spec.rope.beta_slow == 2


def test_the_directory_is_the_packages(tmp_path):
    """Every field, and every tensor's place, as gguf.GGUFReader finds them."""
    path = tmp_path / "model.gguf"
    gguf_cases.write(path, "Q4_0", text=gguf_cases.sentencepiece_text(["a", "b"], [0.0, -1.5], [1, 1]))
    ours, theirs = Directory(path), gguf.GGUFReader(path)
    known = {n: f.contents() for n, f in theirs.fields.items() if not n.startswith("GGUF.")}
    assert ours.metadata == known and len(known) > 12
    places = {
        t.name: (t.tensor_type.name, tuple(int(n) for n in t.shape[::-1]), t.data_offset, t.n_bytes)
        for t in theirs.tensors
    }
    assert {e.name: (e.kind, e.shape, e.first, e.num_bytes) for e in ours.entries.values()} == places


def test_the_types_are_the_packages():
    known = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {n: known[n] for n in TYPES} == TYPES


# ---- refusals ----


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    gguf_cases.write(path, "Q4_1")
    return path.read_bytes()


def refusal(tmp_path, data):
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"bad\.gguf: ") as error:
        checkpoint = Checkpoint.open(path)
        for name in checkpoint.names():
            checkpoint.load(name)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message


def test_a_file_that_is_not_there_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"^org/name\.gguf: cannot be read as GGUF: No such file"):
        Checkpoint.open("org/name.gguf")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"config\.json: no such file: .* or .*/model\.gguf"):
        Checkpoint.open(tmp_path)
    tiny.save_folder(tmp_path / "folder.gguf", tiny.LLAMA, tiny.llama_tensors())
    assert Checkpoint.open("folder.gguf").spec.family == "llama"


def word(data, at, value, size=8):
    return data[:at] + value.to_bytes(size, "little") + data[at + size :]


def after(data, text):
    """Where the bytes behind a text begin."""
    return data.index(text.encode()) + len(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"", "cannot be read as GGUF"),
        (lambda d: b"GGML" + d[4:], "does not begin with GGUF"),
        (lambda d: word(d, 4, 1, 4), "GGUF version 1"),
        (lambda d: word(d, 4, 3 << 24, 4), "big-endian"),
        (lambda d: word(d, 8, 1 << 62), "tensors: the file holds"),
        (lambda d: word(d, 8, 1 << 20), "tensors"),
        (lambda d: word(d, 16, 1 << 40), "metadata fields"),
        (lambda d: word(d, 24, 1 << 63), "characters of a text"),
        (lambda d: d[:480], "tensors: the file holds|the file ends"),
        (lambda d: d[:-100_000], "do not lie in the file"),
        (lambda d: d.replace(b"llama", b"lLama", 1), "general.architecture is 'lLama'"),
        (lambda d: d.replace(b"llama.block_count", b"lLama.block_count"), "block_count is missing"),
        (lambda d: d.replace(b"llama.rope.freq_base", b"llama.context_lengt"), "twice|missing|holds|not"),
        (lambda d: word(d, after(d, "llama.block_count"), 99, 4), "type 99"),
        (lambda d: word(d, after(d, "llama.block_count") + 4, 3, 4), "is missing"),
        (lambda d: word(d, after(d, "llama.block_count") + 4, 1, 4), "is not part"),
        (lambda d: word(d, after(d, "llama.attention.head_count") + 4, 0, 4), "head_count"),
        (lambda d: d.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"), "is there twice"),
        (lambda d: d.replace(b"blk.1.ffn_up", b"blk.1.ffn_UP"), "is missing"),
        (lambda d: word(d, after(d, "blk.0.ffn_up.weight"), 9, 4), "has 9 dimensions"),
        (lambda d: word(d, after(d, "blk.0.ffn_up.weight") + 4, 1 << 61), "larger than the file"),
        (lambda d: word(d, after(d, "blk.0.ffn_up.weight") + 4, 0), "does not hold"),
        (lambda d: word(d, after(d, "blk.0.ffn_up.weight") + 4, 257), "does not hold"),
        (lambda d: word(d, after(d, "blk.0.ffn_up.weight") + 20, 16, 4), r"type 16 \(IQ2_XXS\)"),
        (lambda d: word(d, after(d, "blk.0.ffn_up.weight") + 20, 31, 4), "ggml type 31: it is not"),
        (lambda d: word(d, after(d, "blk.0.ffn_up.weight") + 20, 2, 4), "is not finite"),
        (lambda d: word(d, after(d, "blk.0.ffn_up.weight") + 24, 1 << 63), "do not lie in"),
        (lambda d: word(d, after(d, "blk.0.ffn_up.weight") + 24, 33), "do not lie in"),
    ],
)
def test_damage_is_refused_by_name(change, message, good, tmp_path):
    assert re.search(message, refusal(tmp_path, change(good)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("general.alignment", 12),
        ("general.architecture", "gemma2"),
        ("general.type", "adapter"),
        ("split.count", 3),
        ("llama.expert_count", 8),
        ("llama.attention.value_length", 32),
        ("llama.rope.dimension_count", 32),
        ("llama.attention.head_count_kv", [2, 1]),
        ("llama.feed_forward_length", [512, 256]),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.attn_factor", 0.5),
        ("llama.rope.scaling.yarn_log_multiplier", 0.1),
        ("llama.rope.freq_base_swa", 1e4),
        ("llama.attention.causal", False),
        ("llama.attention.scale", 0.5),
        ("llama.final_logit_softcapping", 30.0),
        ("llama.embedding_scale", 12.0),
        ("llama.something_new", 1),
    ],
)
def test_what_is_not_supported_is_refused(name, value, tmp_path):
    path = tmp_path / "model.gguf"
    gguf_cases.write(path, text=fields({name: value}))
    with pytest.raises(ModelError, match=re.escape(f"{name} is {value!r}")):
        Checkpoint.open(path)


def test_what_changes_nothing_is_read(tmp_path):
    path = tmp_path / "model.gguf"
    nothing = {"vocab_size": 96, "attention.causal": True, "rope.scaling.finetuned": False}
    nothing |= {"expert_count": 0, "rope.scaling.yarn_ext_factor": -1.0}
    text = fields({f"llama.{n}": value for n, value in nothing.items()} | {"split.count": 1})
    assert_same(path, *gguf_cases.write(path, text=text))


def test_a_tied_head_beside_a_narrow_embedding_is_refused(tmp_path):
    def more(writer):
        writer.add_tensor("lm_head.weight", np.zeros((96, 256), np.float32))

    path = tmp_path / "model.gguf"
    gguf_cases.write(path, embed_kind="Q8_0", text=more, tie_word_embeddings=True)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is not the embedding"):
        Checkpoint.open(path)


def test_arrays_of_bytes_are_limited_before_they_are_lists(tmp_path):
    """A byte of a file is eight or more in memory."""
    path = tmp_path / "model.gguf"
    name = b"x.y"
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(name)) + name
    with path.open("wb") as file:
        file.write(head + struct.pack("<IIQ", 9, 0, 50_000_000))
        file.truncate(len(head) + 16 + 50_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=r"'x\.y' has 50000000 values: at most 8388608"):
        Directory(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_arrays_are_limited_together(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    fields = [struct.pack("<Q", 1) + name + struct.pack("<IIQ", 9, 0, 60) + bytes(60) for name in (b"x", b"y")]
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + b"".join(fields))
    monkeypatch.setattr(file, "MAX_VALUES", 120)
    assert [len(values) for values in Directory(path).metadata.values()] == [60, 60]
    monkeypatch.setattr(file, "MAX_VALUES", 119)
    with pytest.raises(ModelError, match="'y' has 60 values: at most 119"):
        Directory(path)


def test_the_end_of_a_turn_ends_an_answer(tmp_path):
    """Beside the end of a text, where the file names both; in their order, once if they are the same."""
    path = tmp_path / "model.gguf"
    for ids, ends in (((7, 9), (7, 9)), ((9, 9), (9,)), ((None, 9), (9,)), ((7, None), (7,))):
        names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot"))
        given = {name: i for name, i in zip(names, ids, strict=True) if i is not None}
        gguf_cases.write(path, text=fields(given, absent=("tokenizer.ggml.eos_token_id",)))
        assert Checkpoint.open(path).eos_token_ids == ends


@pytest.mark.parametrize(("at", "part"), [(0, "scale"), (2, "minimum")])
def test_a_number_that_is_none_is_refused(at, part, good, tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(good)
    first = Directory(path).entries["blk.1.attn_v.weight"].first + 5 * 20 + at
    assert f"'blk.1.attn_v': a {part} is not finite" in refusal(tmp_path, word(good, first, 0x7E00, 2))


def test_another_rope_table_is_refused(tmp_path):
    def more(writer):
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 32).astype(np.float32))

    path = tmp_path / "model.gguf"
    gguf_cases.write(path, text=more)
    with pytest.raises(ModelError, match="not the divisors of Llama 3"):
        Checkpoint.open(path)


def test_without_the_package_k_quants_say_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    gguf_cases.write(path, "Q4_K")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r'Q4_K weights need the gguf package: pip install "kog-triton\[gguf\]"'):
        Checkpoint.open(path).load("layers.0.q_proj")
    narrow = tmp_path / "narrow.gguf"
    monkeypatch.undo()
    gguf_cases.write(narrow, "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert Checkpoint.open(narrow).load("layers.0.q_proj").std() > 0


@pytest.mark.parametrize(
    ("number", "kind", "value"),
    [
        (0, "B", 200),
        (1, "b", -100),
        (2, "H", 60_000),
        (3, "h", -30_000),
        (4, "I", 4_000_000_000),
        (5, "i", -2_000_000_000),
        (6, "f", 0.5),
        (7, "?", True),
        (10, "Q", 1 << 63),
        (11, "q", -(1 << 62)),
        (12, "d", 0.1),
    ],
)
def test_a_metadata_field_of_each_scalar_type_is_read(number, kind, value, tmp_path):
    path, name = tmp_path / "model.gguf", b"x.y"
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(name)) + name
    path.write_bytes(head + struct.pack(f"<I{kind}", number, value))
    assert Directory(path).metadata == {"x.y": value}
