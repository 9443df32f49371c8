"""`kog quantize`: codes and scales are those of the compressed-tensors package, and what is written is read back."""

import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kog_triton import __main__ as kog
from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint import shards
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.formats.packed import pack_words, unpack_words
from kog_triton.checkpoint.quantizing import quantize
from kog_triton.demo import checkpoint_path
from kog_triton.errors import ModelError, RequestError
from kog_triton.model.weight_format import FORMATS, WRITTEN, Code, Offset, Scale, WeightFormat
from kog_triton.quantize import quantize_checkpoint
from kog_triton.text import Tokenizer
from tests.lib import gguf_cases, narrow_cases, text_samples, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PROJECTIONS = narrow_cases.PROJECTIONS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A bf16 Qwen2 in a folder, with a tokenizer."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    tiny.save_hf(tiny.hf_model("qwen2", **narrow_cases.SIZES), folder, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    tiny.write_json(folder / "config.json", config | {"dtype": "bfloat16"})
    text_samples.make_tokenizer("byte_level").save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(gguf_cases.TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):
    """format name -> the folder that was written."""
    out = tmp_path_factory.mktemp("narrow")
    for name in WRITTEN:
        quantize_checkpoint(model, out / name, name)
    return lambda name: out / name


def package_scheme(folder):
    from compressed_tensors.quantization import QuantizationScheme

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    return QuantizationScheme(**config["config_groups"]["group_0"]), config


def groups_of(w, how):
    """[row groups, group rows, column groups, group columns], padded with zeros."""
    down, across = how.grid(*w.shape)
    high, wide = how.group_rows or w.shape[0], how.group_cols or w.shape[1]
    padded = torch.nn.functional.pad(w, (0, across * wide - w.shape[1], 0, down * high - w.shape[0]))
    return padded.reshape(down, high, across, wide)


@pytest.mark.parametrize("name", WRITTEN)
def test_codes_and_scales_are_the_packages(name, model, written):
    from compressed_tensors.quantization.lifecycle.forward import quantize as package_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    wide, narrow = Checkpoint.open(model), Checkpoint.open(written(name))
    scheme, _ = package_scheme(written(name))
    how = FORMATS[name]
    for part in PROJECTIONS:
        w, got = wide.load(f"layers.1.{part}")[0].float(), narrow.narrow(f"layers.1.{part}")
        assert got.format == how
        groups = groups_of(w, how)
        scales, _ = calculate_qparams(groups.amin((1, 3)), groups.amax((1, 3)), scheme.weights)
        scales = scales.to(got.scales.dtype)
        assert torch.equal(got.scales[0], scales)
        kind = torch.float8_e4m3fn if how.code is Code.E4M3 else torch.int8
        codes = package_quantize(w, scales.float(), None, scheme.weights, dtype=kind)
        ours = got.codes[0].view(kind) if how.code is Code.E4M3 else got.codes[0]
        if how.code is Code.UINT4:
            ours = ours.to(torch.int8) - 8
        assert torch.equal(ours.float(), codes.float())


@pytest.mark.filterwarnings("ignore:You passed")
@pytest.mark.parametrize("name", WRITTEN)
def test_the_package_and_transformers_read_what_is_written(name, written):
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    ids = tiny.token_ids(20, narrow_cases.SIZES["vocab_size"])
    theirs = AutoModelForCausalLM.from_pretrained(
        written(name),
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=CompressedTensorsConfig(run_compressed=False),
    )
    checkpoint = Checkpoint.open(written(name))
    state = theirs.state_dict()
    for part in ("q_proj", "o_proj"):
        stored = state[f"model.layers.1.self_attn.{part}.weight"].float()
        ours = checkpoint.load(f"layers.1.{part}")[0]
        assert torch.allclose(stored, ours, rtol=2**-8)  # theirs is in the scales' type
    with torch.no_grad():
        for stored, tensor in state.items():
            if stored.endswith(tuple(f"{p}.weight" for p in PROJECTIONS)):
                _, _, layer, _, part, _ = stored.split(".")
                tensor.copy_(checkpoint.load(f"layers.{layer}.{part}")[0])
        want = theirs.float()(torch.tensor([ids])).logits[0].double()
    got = ReferenceBackend(checkpoint, BackendOptions()).forward_logits(ids)
    assert (torch.from_numpy(got).double() - want).norm() / want.norm() <= 1e-5


@pytest.mark.parametrize("name", WRITTEN)
def test_every_weight_is_within_half_a_step(name, model, written):
    wide, narrow = Checkpoint.open(model), Checkpoint.open(written(name))
    half = 0.5 if FORMATS[name].code is not Code.E4M3 else 16.0  # e4m3's largest step is 32
    for part in PROJECTIONS:
        w, got = wide.load(f"layers.0.{part}").float(), narrow.narrow(f"layers.0.{part}")
        step = half * got._spread(got.scale_values())
        assert bool(((w - got.unpack()).abs() <= step * 1.08).all())  # a scale is rounded too
    for same in ("embed", "lm_head", "norm", "layers.0.q_bias", "layers.1.mlp_norm"):
        assert torch.equal(wide.load(same), narrow.load(same))


def test_bytes_and_texts(model, written):
    before, after = Checkpoint.open(model).spec, Checkpoint.open(written("int4-g128")).spec
    assert 3 < before.bytes_per_token / after.bytes_per_token < 4
    assert after.replace(narrow=()) == before and len(after.narrow) == 14
    assert Tokenizer.load(written("int4-g128")).has_chat_template
    config = json.loads((written("fp8-block") / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["model.embed_tokens", "lm_head"]


def test_edge_blocks_are_padded_with_zeros():
    w = torch.randn(200, 150, generator=torch.Generator().manual_seed(1))
    got = quantize(w, FORMATS["fp8-block"])
    padded = quantize(torch.nn.functional.pad(w, (0, 106, 0, 56)), FORMATS["fp8-block"])
    assert torch.equal(got.scales, padded.scales) and got.scales.shape == (2, 2)
    assert torch.equal(got.codes, padded.codes[:200, :150])
    assert got.scales[1, 1] == w[128:, 128:].abs().max() / 448


@pytest.mark.parametrize("name", WRITTEN)
def test_zeros_and_extremes(name):
    w = torch.zeros(256, 256)
    w[0, 0], w[130, 5] = 3e38, -1e-38
    got = quantize(w, FORMATS[name])
    values = got.unpack()
    assert values.isfinite().all() and values[0, 0] > 2.5e38 and not values[200].any()


def test_slices_of_a_large_matrix_are_joined(monkeypatch):
    from kog_triton.checkpoint import quantizing

    w = torch.randn(3, 300, 64, generator=torch.Generator().manual_seed(2))
    for name in ("fp8-block", "int4-g32", "fp8-channel"):
        whole = quantize(w, FORMATS[name])
        with monkeypatch.context() as patch:
            patch.setattr(quantizing, "_SLICE", 3 * 64 * 10)
            parts = quantize(w, FORMATS[name])
        assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.scales, parts.scales)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_of_codes(bits):
    codes = torch.randint(0, 1 << bits, (3, 37), dtype=torch.uint8)
    words = pack_words(codes, bits)
    assert words.shape == (3, math.ceil(37 * bits / 32)) and words.dtype is torch.int32
    assert torch.equal(unpack_words(words, bits)[:, :37], codes)


def test_many_shards_read_like_one_file(model, written, tmp_path, monkeypatch):
    monkeypatch.setattr(shards.ShardWriter.__init__, "__defaults__", (50_000,))
    quantize_checkpoint(model, tmp_path / "out", "int8-channel")
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 4 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert not list((tmp_path / "out").glob("*.part"))
    assert all(p.stat().st_mode & 0o444 == 0o444 for p in (tmp_path / "out").iterdir())
    one, many = Checkpoint.open(written("int8-channel")), Checkpoint.open(tmp_path / "out")
    assert all(torch.equal(one.load(n), many.load(n)) for n in one.names())


def test_from_a_gguf_file(tmp_path, capsys):
    """Narrow in, narrow out: the file's weights are unpacked, and its tokenizer becomes a folder's."""
    path = tmp_path / "model.gguf"
    origin = text_samples.make_tokenizer("byte_level")
    text = gguf_cases.byte_level_text(origin, "gpt-2")
    more = {"vocab_size": len(origin.get_vocab()), "tie_word_embeddings": True}
    gguf_cases.write(path, "Q8_0", embed_kind="Q8_0", text=text, **more)
    quantize_checkpoint(path, tmp_path / "out", "int8-channel")
    assert "the source is already int8 g32: values are rounded twice\n" in capsys.readouterr().err
    before, after = Checkpoint.open(path), Checkpoint.open(tmp_path / "out")
    assert after.config["architectures"] == ["LlamaForCausalLM"]
    assert after.eos_token_ids == before.eos_token_ids
    for name in ("layers.0.q_proj", "layers.1.down_proj"):
        assert (before.load(name) - after.load(name)).abs().max() <= before.load(name).abs().max() / 120
    assert torch.equal(after.load("embed"), before.load("embed").half())
    ours = Tokenizer.load(tmp_path / "out")
    said = [{"role": "user", "content": "Hi <|im_end|>"}]
    assert ours.encode("abc def") == origin.encode("abc def", add_special_tokens=False).ids
    assert ours.encode_chat(said).count(origin.token_to_id("<|im_end|>")) == 1


def test_a_model_of_lanes(tmp_path, capsys):
    """The demo, whose rows of queries and keys are stored interleaved: as good as before in 8 bits."""
    argv = ["quantize", "--model", str(checkpoint_path()), "--out", str(tmp_path / "demo")]
    assert kog.main([*argv, "--format", "int8-channel"]) == 0
    assert "(int8-channel)" in capsys.readouterr().err
    ids = Tokenizer.load(checkpoint_path()).encode("def read_lines(path):\n    ")
    options = BackendOptions()
    want = ReferenceBackend(Checkpoint.open(checkpoint_path()), options).forward_logits(ids)
    got = ReferenceBackend(Checkpoint.open(tmp_path / "demo"), options).forward_logits(ids)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02
    assert set(load_file(tmp_path / "demo" / "model.safetensors")) > {"model.norm.weight"}


# ---- refusals ----


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (
            "model",
            "int4-g64",
            "layers.0.q_proj: 96 columns .* of 64: choose one of fp8-block, fp8-channel, int8-channel$",
        ),
        ("demo", "fp8-block", "does not go with lanes: choose one of fp8-channel, int8-channel, int4-g32$"),
    ],
)
def test_a_group_that_does_not_divide_is_refused(source, name, message, tmp_path):
    folder = checkpoint_path()
    if source == "model":
        folder = tiny.save_hf(tiny.hf_model("llama", hidden_size=96, num_attention_heads=4), tmp_path / "a")
    with pytest.raises(ModelError, match=message):
        quantize_checkpoint(folder, tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_left_alone(model, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="name a folder that is not there yet"):
        quantize_checkpoint(model, tmp_path, "int4-g32")
    argv = ["quantize", "--model", str(model), "--out", str(tmp_path), "--format", "int4-g32"]
    assert kog.main(argv) == 2 and "not there yet" in capsys.readouterr().err
    argv[4] = "/proc/foo"
    assert kog.main(argv) == 2 and "/proc/foo: it cannot be created there: " in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "how",
    [
        FORMATS["mxfp4"],
        WeightFormat(Code.UINT4, 1, 32, Scale.BF16, Offset.ZERO_POINT),
        WeightFormat(Code.E4M3, 128, 128, Scale.E8M0),
    ],
)
def test_formats_that_are_not_written(how):
    with pytest.raises(ModelError, match="are not made"):
        quantize(torch.ones(32, 32), how)


def test_a_weight_that_is_no_number_is_refused(tmp_path):
    tensors = tiny.llama_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    folder = tiny.save_folder(tmp_path / "model", tiny.LLAMA, tensors)
    with pytest.raises(ModelError, match=r"layers\.1\.up_proj: a scale is not finite"):
        quantize_checkpoint(folder, tmp_path / "out", "int8-channel")
    assert not (tmp_path / "out").exists()


DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that may not grow is an error, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
from kog_triton.quantize import main
sys.exit(main())
"""


def test_a_disk_that_takes_no_more_is_said_and_nothing_is_left(model, tmp_path):
    argv = ["--model", str(model), "--out", str(tmp_path / "out"), "--format", "int8-channel"]
    done = subprocess.run([sys.executable, "-c", DISK, *argv], capture_output=True, text=True)
    assert done.returncode == 2
    assert re.search(r"error: .*\.part: cannot be written: .*File too large", done.stderr)
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_nothing(model, tmp_path, monkeypatch):
    def stop(self, name, tensor):
        raise KeyboardInterrupt

    monkeypatch.setattr(shards.ShardWriter, "add", stop)
    argv = ["quantize", "--model", str(model), "--out", str(tmp_path / "out")]
    assert kog.main([*argv, "--format", "int4-g32"]) == 130
    assert not (tmp_path / "out").exists()


def test_progress_goes_to_a_terminal(model, tmp_path, monkeypatch, capsys):
    """How many bytes of how many; nothing of it where stderr is a file."""
    argv = ["quantize", "--model", str(model), "--format", "int8-channel", "--out"]
    assert kog.main([*argv, str(tmp_path / "quiet")]) == 0
    size = Checkpoint.open(model).spec.weight_bytes
    total = sum(map(size, Checkpoint.open(model).names())) / 1e6
    assert "MB" not in capsys.readouterr().err
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert kog.main([*argv, str(tmp_path / "shown")]) == 0
    assert f"/{total:.1f} MB" in capsys.readouterr().err
