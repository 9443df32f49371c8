"""Opening and loading checkpoints: exact values, one-line errors, no surprises from damage.

The oracle for values is the dictionary of tensors that was written. Random damage is the subject
of test_damaged_checkpoint.py.
"""

import json
import resource
import shutil
import struct
import time

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from kog_triton.checkpoint.folder import Checkpoint, half_split_rows
from kog_triton.checkpoint.hub import INDEX, TOKENIZER_FILES, model_folder
from kog_triton.errors import ModelError
from kog_triton.model.families import sources
from kog_triton.model.spec import DType
from kog_triton.text import Tokenizer
from tests.lib import tiny
from tests.lib.fake_checkpoint import END, make_checkpoint


@pytest.fixture
def folder(tmp_path):
    return tiny.save_folder(tmp_path / "model", tiny.LLAMA, tiny.llama_tensors())


def refusal(folder):
    """The message with which opening fails: one line, of sane length."""
    with pytest.raises(ModelError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


def assert_loads(folder, tensors):
    """Every weight comes back in its canonical shape with the values that were written."""
    checkpoint = Checkpoint.open(folder)
    where = sources(checkpoint.spec)
    assert len(checkpoint.names()) == len(tensors)
    for name in checkpoint.names():
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        pattern = name.replace(f"layers.{layer}.", "layers.{}.")
        stored = next(n.format(layer) for n in where[pattern].names if n.format(layer) in tensors)
        got = checkpoint.load(name)
        assert tuple(got.shape) == checkpoint.spec.shapes[pattern]
        assert torch.equal(got.reshape(tensors[stored].shape), tensors[stored])


# ---- what loads ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_shapes_and_dtype(tmp_path, dtype):
    tensors = tiny.llama_tensors(dtype)
    folder = tiny.save_folder(tmp_path, tiny.LLAMA, tensors)
    assert_loads(folder, tensors)
    stored = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
    assert Checkpoint.open(folder).spec.dtype is stored[dtype]


def test_config_dtype_wins_over_the_files(tmp_path):
    folder = tiny.save_folder(tmp_path, tiny.LLAMA | {"torch_dtype": "bfloat16"}, tiny.llama_tensors())
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.spec.dtype is DType.BF16
    assert checkpoint.load("embed").dtype is torch.float32


def test_shards_load_like_one_file(folder):
    tiny.shard(folder)
    assert_loads(folder, tiny.llama_tensors())


def test_names_without_the_model_prefix(tmp_path):
    tensors = {n.removeprefix("model."): t for n, t in tiny.llama_tensors().items()}
    assert_loads(tiny.save_folder(tmp_path, tiny.LLAMA, tensors), tensors)


def test_harmless_extras_are_ignored(tmp_path):
    tensors = tiny.llama_tensors()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    folder = tiny.save_folder(tmp_path, tiny.LLAMA, tensors | extra)
    assert_loads(folder, tensors)


@pytest.mark.parametrize("kept", ["both", "embed", "head"])
def test_tied_embeddings_in_every_spelling(tmp_path, kept):
    tensors = tiny.llama_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    want = tensors["lm_head.weight"]
    if kept == "embed":
        del tensors["lm_head.weight"]
    if kept == "head":
        del tensors["model.embed_tokens.weight"]
    folder = tiny.save_folder(tmp_path, tiny.LLAMA | {"tie_word_embeddings": True}, tensors)
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(checkpoint.load("embed"), want)
    assert "lm_head" not in checkpoint.names()


def test_tied_model_with_another_head_is_refused(tmp_path):
    folder = tiny.save_folder(tmp_path, tiny.LLAMA | {"tie_word_embeddings": True}, tiny.llama_tensors())
    assert "tie_word_embeddings" in refusal(folder)


def test_interleaved_rows_become_half_split():
    """Against complex numbers: turning neighbours, or halves after reordering, scores alike."""
    g = torch.Generator().manual_seed(4)
    rows = torch.randn(2, 3 * 8, 5, generator=g)
    moved = half_split_rows(rows, 8)
    for lane in range(2):
        for head in range(3):
            for k in range(4):
                pair = rows[lane, head * 8 + 2 * k : head * 8 + 2 * k + 2]
                assert torch.equal(moved[lane, head * 8 + k], pair[0])
                assert torch.equal(moved[lane, head * 8 + 4 + k], pair[1])


def test_only_query_and_key_rows_of_a_laneformer_move(tmp_path):
    config = tiny.laneformer_config()
    tensors = tiny.laneformer_tensors(config)
    checkpoint = Checkpoint.open(tiny.save_folder(tmp_path, config, tensors))
    prefix = "model.layers.1."
    v = tensors[prefix + "attention.wv.weight"]
    assert torch.equal(checkpoint.load("layers.1.v_proj"), v)
    q = tensors[prefix + "attention.wq.weight"]
    got = checkpoint.load("layers.1.q_proj")
    assert not torch.equal(got, q) and torch.equal(got, half_split_rows(q, 6))
    up = checkpoint.load("layers.1.up_proj")
    assert torch.equal(up, tensors[prefix + "feed_forward.w3.weight"])


def test_unknown_weight_is_named(folder):
    with pytest.raises(ModelError, match=r"layers\.2\.q_proj"):
        Checkpoint.open(folder).load("layers.2.q_proj")


def test_loading_leaves_the_file_as_it_is(folder):
    before = (folder / "model.safetensors").read_bytes()
    Checkpoint.open(folder).load("embed").zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_opening_reads_headers_only(tmp_path):
    """A sparse file of 2 GiB opens at once and in little memory; one weight costs one weight."""
    config = tiny.LLAMA | {"vocab_size": 1 << 24, "hidden_size": 16, "tie_word_embeddings": True}
    tensors = {n: t for n, t in tiny.llama_tensors().items() if n.startswith("model.layers")}
    tensors["model.norm.weight"] = torch.ones(16)
    header, offset = {}, 0
    shapes = {n: list(t.shape) for n, t in tensors.items()}
    for name, shape in (shapes | {"model.embed_tokens.weight": [1 << 24, 32]}).items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    tiny.write_json(tmp_path / "config.json", config)
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    assert "[16777216, 32]" in refusal(tmp_path)
    assert time.thread_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


# ---- begin and end of text, sampling defaults ----


@pytest.mark.parametrize(
    ("generation", "eos", "bos"),
    [
        (None, (2,), 1),
        ({"eos_token_id": [3, 7, 3]}, (3, 7), 1),
        ({"eos_token_id": 5, "bos_token_id": 0}, (5,), 0),
        ({"eos_token_id": None}, (2,), 1),
    ],
)
def test_generation_config_wins(folder, generation, eos, bos):
    if generation is not None:
        tiny.write_json(folder / "generation_config.json", generation)
    checkpoint = Checkpoint.open(folder)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id) == (eos, bos)


def test_sampling_defaults_are_read(folder):
    given_values = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    unread = {"transformers_version": "9", "pad_token_id": -1, "min_p": None}
    tiny.write_json(folder / "generation_config.json", given_values | unread)
    assert Checkpoint.open(folder).generation == given_values


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"top_k": True},
        {"top_k": 1.5},
        {"do_sample": 1},
        {"eos_token_id": [1, "a"]},
        {"eos_token_id": 40},
        {"bos_token_id": -1},
    ],
    ids=str,
)
def test_wrong_sampling_defaults_are_named(folder, wrong):
    tiny.write_json(folder / "generation_config.json", wrong)
    message = refusal(folder)
    assert "generation_config.json" in message and next(iter(wrong)) in message


# ---- folders and files that are refused ----


def test_missing_tensor_is_named(tmp_path):
    tensors = tiny.llama_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    folder = tiny.save_folder(tmp_path, tiny.LLAMA, tensors)
    assert "'model.layers.1.mlp.up_proj.weight' is missing" in refusal(folder)


def test_extra_tensor_is_named(tmp_path):
    extra = {"model.layers.0.self_attn.q_proj.bias": torch.ones(12)}
    folder = tiny.save_folder(tmp_path, tiny.LLAMA, tiny.llama_tensors() | extra)
    message = refusal(folder)
    assert "q_proj.bias" in message and "model.safetensors" in message


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(16, 40), torch.ones(640), torch.ones(1, 40, 16), torch.ones(40, 16).double()],
    ids=["rotated", "flat", "deep", "double"],
)
def test_wrong_shape_or_dtype_is_named(tmp_path, wrong):
    folder = tiny.save_folder(tmp_path, tiny.LLAMA, tiny.llama_tensors() | {"lm_head.weight": wrong})
    message = refusal(folder)
    assert "lm_head.weight" in message
    assert ("F64" if wrong.dtype is torch.float64 else str(list(wrong.shape))) in message


@pytest.mark.parametrize("cut", [1, 1000, 100_000])
def test_truncated_file_is_named(folder, cut):
    tiny.shard(folder)
    file = folder / "model-00002-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: max(0, len(data) - cut)])
    assert file.name in refusal(folder)


def test_missing_shard_is_named(folder):
    tiny.shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: missing" in refusal(folder)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "x.bin", 3, None, ""])
def test_index_may_not_leave_the_folder(folder, file):
    weight_map = tiny.shard(folder)
    weight_map["lm_head.weight"] = file
    tiny.write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    assert "plain name" in refusal(folder)


def test_index_and_headers_must_agree(folder):
    weight_map = tiny.shard(folder)
    files = sorted(set(weight_map.values()))
    weight_map["lm_head.weight"] = files[1]
    tiny.write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    assert "lm_head.weight" in refusal(folder)


def test_a_shard_may_hold_no_more_than_the_index_says(folder):
    weight_map = tiny.shard(folder)
    file = folder / "model-00002-of-00002.safetensors"
    # Elsewhere it would pass for a table that is computed again, and be left out in silence.
    more = {"model.rotary_emb.inv_freq": torch.ones(3)}
    save_file(load_file(file) | more, file)
    tiny.write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    assert "'model.rotary_emb.inv_freq' is in the file but not in" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_advice(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder)
    assert name in message and "safetensors" in message


def test_no_weights_and_no_config(tmp_path):
    tiny.write_json(tmp_path / "config.json", tiny.LLAMA)
    assert "model.safetensors" in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "config.json: no such file: pass the folder of" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", '{"a":' * 100_000, "\xff", "1" * 5000])
def test_malformed_config_is_one_line(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refusal(folder)


def test_config_that_is_a_folder(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json" in refusal(folder)


# ---- the hub ----


def test_no_name_is_not_the_current_folder():
    with pytest.raises(ModelError, match="the model has no name"):
        model_folder("")
    with pytest.raises(ModelError, match="the model is None: pass a folder"):
        model_folder(None)


@pytest.mark.parametrize("path", ["no-such-folder", "a/b/c", "/nowhere/at/all", "../up"])
def test_what_is_no_folder_and_no_hub_id(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        model_folder(path)


def test_a_file_is_not_a_model(folder):
    with pytest.raises(ModelError, match="pass the folder"):
        Checkpoint.open(folder / "config.json")


def test_revision_needs_the_hub(folder):
    with pytest.raises(ModelError, match="no revision"):
        Checkpoint.open(folder, revision="main")


# What repositories of the hub hold beside what is read.
UNREAD = (
    "README.md", "chat_template.json", "consolidated.safetensors", "flax_model.msgpack", "model-q4.gguf",
    "onnx/model.onnx", "original/consolidated.00.pth", "original/model.safetensors", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "tokenizer.model", "training_args.bin", "vocab.json",
)  # fmt: skip


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that serves one folder; what of it was fetched lies in another."""
    repository, fetched = tmp_path / "repository", tmp_path / "fetched"
    asked = {}

    def snapshot_download(repo_id, *, revision, allow_patterns):
        asked.update(repo_id=repo_id, revision=revision)
        names = [str(p.relative_to(repository)) for p in repository.rglob("*") if p.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (fetched / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(repository / name, fetched / name)
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return repository, fetched, asked


def test_hub_fetches_files_of_other_names_that_the_index_names(hub):
    repository, fetched, asked = hub
    make_checkpoint(repository)
    tiny.shard(repository)
    index = json.loads((repository / INDEX).read_text())
    old = sorted(set(index["weight_map"].values()))
    new = {name: f"weights.{n}.safetensors" for n, name in enumerate(old)}
    for name in old:
        (repository / name).rename(repository / new[name])
    index["weight_map"] = {k: new[v] for k, v in index["weight_map"].items()}
    (repository / INDEX).write_text(json.dumps(index))
    (repository / "consolidated.safetensors").touch()
    checkpoint = Checkpoint.open("org/name", revision="v1")
    assert asked["revision"] == "v1" and not (fetched / "consolidated.safetensors").exists()
    local = Checkpoint.open(repository)
    assert all(torch.equal(checkpoint.load(n), local.load(n)) for n in local.names())


@pytest.mark.parametrize("sharded", [False, True])
def test_hub_fetches_what_is_read_and_nothing_else(hub, sharded):
    repository, fetched, asked = hub
    make_checkpoint(repository, temperature=0.5)
    if sharded:
        tiny.shard(repository)
    (repository / "special_tokens_map.json").write_text('{"eos_token": "<end>"}')
    config = {"chat_template": "config"}  # without the tokens' map: the other file has it
    (repository / "tokenizer_config.json").write_text(json.dumps(config))
    (repository / "chat_template.jinja").write_text("default")
    (repository / "additional_chat_templates").mkdir()
    (repository / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    read = {str(p.relative_to(repository)) for p in repository.rglob("*") if p.is_file()}
    for name in UNREAD:
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).touch()
    checkpoint = Checkpoint.open("org/name", revision="v1")
    assert asked == {"repo_id": "org/name", "revision": "v1"}
    assert {str(p.relative_to(fetched)) for p in fetched.rglob("*") if p.is_file()} == read
    assert checkpoint.folder == fetched and checkpoint.generation["temperature"] == 0.5
    local = Checkpoint.open(repository)
    for name in local.names():
        assert torch.equal(checkpoint.load(name), local.load(name))
    tokenizer = Tokenizer.load(fetched)
    assert tokenizer.eos_token_id == END
    message = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(message) == "default"
    assert tokenizer.render_chat(message, tools=[{"name": "f"}]) == "tools"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("a/b", True),
        ("o" * 96 + "/" + "n" * 96, True),
        ("o" * 97 + "/n", False),
        ("o/" + "n" * 97, False),
        ("Org-1.x_y/Model.v2-3_4", True),
        (".org/name", False),
        ("org/-name", False),
        ("org/na me", False),
        ("org/name/", False),
        ("org", False),
    ],
)
def test_names_of_the_hub(hub, monkeypatch, tmp_path, name, is_one):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(hub[0])
    if is_one:
        assert model_folder(name) == hub[1] and hub[2]["repo_id"] == name
    else:
        with pytest.raises(ModelError, match="not a hub id of the form org/name"):
            model_folder(name)


def test_hub_failure_is_one_line_with_advice(monkeypatch):
    def snapshot_download(*args, **kwargs):
        raise OSError("cannot reach the host\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    message = refusal("org/name")
    assert "cannot reach the host" in message and "pass the folder" in message

    class LocalEntryNotFoundError(OSError):
        """As huggingface_hub names it."""

    def offline(*args, **kwargs):
        raise LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert refusal("org/name") == (
        "org/name: no such folder, not fetched before, and the hub cannot be reached: is there a network? "
        "Or download it elsewhere and pass the folder"
    )


def test_an_index_that_nobody_asked_for_fetches_nothing(hub):
    repository, fetched, _ = hub
    for folder in (repository, fetched):
        folder.mkdir()
        (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "weights.safetensors"}}))
    (repository / "weights.safetensors").touch()
    assert model_folder("org/name", files=TOKENIZER_FILES) == fetched
    assert not (fetched / "weights.safetensors").exists()
    model_folder("org/name")
    assert (fetched / "weights.safetensors").exists()
