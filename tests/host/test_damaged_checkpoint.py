"""Damaged checkpoints: a ModelError of one line or every weight right, never anything else.

config.json, the index and the safetensors header are changed at random, some hundred cases a run.
"""

import json
import shutil
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.errors import ModelError
from kog_triton.model.families import read_spec, sources
from tests.lib import tiny


@pytest.fixture
def folder(tmp_path):
    return tiny.save_folder(tmp_path / "model", tiny.LLAMA, tiny.llama_tensors())


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 130),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 70), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "type", "x"]), st.text(max_size=6)),
)
FAST = settings(
    max_examples=150,
    deadline=2000,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def open_or_refuse(folder, tensors):
    """The promise: a ModelError of one line, or every weight right. Anything else escapes."""
    try:
        checkpoint = Checkpoint.open(folder)
        loaded = [checkpoint.load(name) for name in checkpoint.names()]
    except ModelError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    flat = torch.cat([t.flatten().double() for t in loaded]).sort().values
    want = torch.cat([t.flatten().double() for t in tensors.values()]).sort().values
    assert torch.equal(flat, want)


@FAST
@given(st.data())
def test_damaged_config(folder, data):
    keys = [*tiny.LLAMA, "rope_theta", "rope_scaling", "rope_parameters", "dtype", "layer_types"]
    keys += ["tie_word_embeddings", "sliding_window", "num_experts", "attention_bias", "mlp_bias"]
    change = data.draw(st.dictionaries(st.sampled_from(keys), SCALARS, min_size=1, max_size=3))
    tiny.write_json(folder / "config.json", tiny.LLAMA | change)
    open_or_refuse(folder, tiny.llama_tensors())


@FAST
@given(st.data())
def test_damaged_laneformer_config(data):
    config = tiny.laneformer_config()
    change = data.draw(st.dictionaries(st.sampled_from(sorted(config)), SCALARS, min_size=1))
    try:
        spec = read_spec(config | change)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert set(sources(spec)) == set(spec.shapes)


@FAST
@given(st.data())
def test_damaged_index(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("index")
    tiny.save_folder(folder, tiny.LLAMA, tiny.llama_tensors())
    weight_map = tiny.shard(folder)
    names = [*sorted(weight_map), "x", ""]
    files = st.one_of(SCALARS, st.sampled_from(sorted(set(weight_map.values()))))
    weight_map |= data.draw(st.dictionaries(st.sampled_from(names), files, max_size=2))
    for name in data.draw(st.lists(st.sampled_from(names), max_size=2)):
        weight_map.pop(name, None)
    index = data.draw(st.one_of(st.just({"weight_map": weight_map}), SCALARS))
    tiny.write_json(folder / "model.safetensors.index.json", index)
    open_or_refuse(folder, tiny.llama_tensors())
    shutil.rmtree(folder)


@FAST
@given(st.data())
def test_damaged_header(folder, data):
    """One entry of the header is changed, or a few of the file's first bytes."""
    tensors = tiny.llama_tensors()
    save_file(tensors, folder / "model.safetensors")
    raw = (folder / "model.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if data.draw(st.booleans()):
        entry = header[data.draw(st.sampled_from(sorted(header)))]
        part = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        numbers = st.lists(st.integers(-1, 2**64), max_size=3)
        words = st.sampled_from(["F16", "F64", "I8", "BOOL", "F8_E4M3", "U64", "?"])
        entry[part] = data.draw(st.one_of(SCALARS, words if part == "dtype" else numbers))
        text = json.dumps(header).encode()
        raw = struct.pack("<Q", len(text)) + text + body
    else:
        mutable = bytearray(raw)
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, 8 + length - 1))
            mutable[place] = data.draw(st.integers(0, 255))
        raw = bytes(mutable)
    (folder / "model.safetensors").write_bytes(raw)
    try:
        checkpoint = Checkpoint.open(folder)
    except ModelError as error:
        assert "\n" not in str(error)
        return
    # A flipped byte of an offset or a name may still be a valid file: then its shapes are right.
    for name in checkpoint.names():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        pattern = name.replace(f"layers.{layer}.", "layers.{}.")
        assert tuple(checkpoint.load(name).shape) == checkpoint.spec.shapes[pattern]


def test_more_tensors_than_a_model_has_are_refused_before_they_are_read(folder, monkeypatch):
    monkeypatch.setattr("kog_triton.checkpoint.tensor_files.MAX_TENSORS", 9)
    with pytest.raises(ModelError, match=r"model\.safetensors: \d+ tensors: at most 9 are read"):
        Checkpoint.open(folder)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {str(i): "x.safetensors" for i in range(10)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"index\.json: 10 tensors: at most 9 are read"):
        Checkpoint.open(folder)


def test_a_name_in_a_broken_header_does_not_drive_a_terminal(folder):
    header = json.dumps({"\x1b[2Jx": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}).encode()
    data = struct.pack("<Q", len(header)) + header
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"not a whole safetensors file .*\[2Jx") as error:
        Checkpoint.open(folder)
    assert str(error.value).isprintable()
