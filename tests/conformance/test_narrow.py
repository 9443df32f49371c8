"""Narrow checkpoints: a backend reads them or refuses them in one line, and none unpacks in silence."""

import logging

import pytest

from kog_triton import __main__ as kog
from kog_triton.backends import BackendOptions, choose, find_backend, why_not_narrow
from kog_triton.backends.choose import Candidate
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.errors import DeviceError
from kog_triton.llm import LLM
from kog_triton.text import Tokenizer
from tests.lib import narrow_cases
from tests.lib.fake_checkpoint import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
UNREAD = "it reads groups of a power of two from 32 on, not int4 g16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An FP8 checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("narrow")
    sizes = narrow_cases.SIZES | {"vocab_size": 300}
    narrow_cases.checkpoint("fp8_block", folder, sizes=sizes)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    assert Tokenizer.load(folder).vocab_size <= 300
    return folder


@pytest.fixture(scope="module")
def unread(tmp_path_factory):
    """A checkpoint of a format that the Triton backend does not read."""
    folder = tmp_path_factory.mktemp("unread")
    sizes = narrow_cases.SIZES | {"vocab_size": 300}
    narrow_cases.checkpoint("ct_int4_g16", folder, sizes=sizes)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def test_a_gpu_backend_refuses_before_it_looks_for_a_gpu(unread):
    with pytest.raises(DeviceError) as error:
        find_backend("triton")(Checkpoint.open(unread), BackendOptions())
    assert str(error.value) == (f"backend triton cannot run this checkpoint: {UNREAD}; choose --backend reference")


def test_what_the_triton_backend_does_not_read_it_refuses_by_name(folder):
    spec = Checkpoint.open(folder).spec
    triton = find_backend("triton")
    assert why_not_narrow(triton, spec) == ""
    assert "is 16 bits wide" in why_not_narrow(triton, spec.replace(narrow=spec.narrow[1:]))
    head = spec.replace(narrow=(*spec.narrow, ("lm_head", spec.narrow[0][1])))
    assert why_not_narrow(triton, head) == ""


def test_what_the_cuda_backend_does_not_read_it_refuses_by_name(folder):
    spec = Checkpoint.open(folder).spec
    cuda = find_backend("cuda")
    assert why_not_narrow(cuda, spec) == ""
    mixed = spec.replace(narrow=spec.narrow[1:])
    assert "is 16 bits wide" in why_not_narrow(cuda, mixed)


@pytest.fixture
def gpu(monkeypatch):
    """As if every backend that is installed could run here, but the CUDA backend."""

    def look_at(name):
        return Candidate(name, name != "cuda", "no Hopper GPU" if name == "cuda" else "", "")

    monkeypatch.setattr(choose, "look_at", look_at)


def test_auto_takes_the_reference_and_says_why(unread, gpu):
    spec = Checkpoint.open(unread).spec
    choice = choose.choose("auto", "", spec)
    assert choice.name == "reference"
    assert f"triton: {UNREAD}" in choice.reason
    assert choose.choose("auto", "", spec.replace(narrow=())).name == "triton"


def test_auto_takes_the_cuda_backend_for_weights_that_it_reads(folder, monkeypatch):
    monkeypatch.setattr(choose, "look_at", lambda name: Candidate(name, True, "", ""))
    assert choose.choose("auto", "", Checkpoint.open(folder).spec).name == "cuda"


def test_the_llm_says_that_it_takes_another_backend_than_it_would(unread, gpu, caplog):
    with caplog.at_level(logging.WARNING), LLM(unread) as llm:
        assert llm.choice.name == "reference"
    said = [r.getMessage() for r in caplog.records if "activations" not in r.getMessage()]
    assert said == [f"backend reference: cuda: no Hopper GPU; triton: {UNREAD}"]


def test_a_named_backend_is_refused(unread, gpu):
    spec = Checkpoint.open(unread).spec
    with pytest.raises(DeviceError, match=f"backend triton cannot run this checkpoint: {UNREAD}"):
        choose.choose("triton", "", spec)
    assert choose.choose("reference", "", spec).name == "reference"
    assert choose.choose("triton", "", spec.replace(narrow=())).name == "triton"


def test_the_llm_says_what_the_checkpoint_asks_for_and_is_not_done(folder, caplog):
    with caplog.at_level(logging.WARNING), LLM(folder, backend="reference") as llm:
        assert llm.engine.backend.spec.narrow == () and llm.checkpoint.spec.narrow
    assert [r.getMessage() for r in caplog.records] == [
        f"{folder}: activations stay wide: the checkpoint's dynamic FP8 activations are not used"
    ]


def test_the_command_says_it_on_stderr(folder, capsys):
    argv = ["generate", "--model", str(folder), "-p", "a", "-m", "2", "--temp", "0"]
    assert kog.main(argv) == 0
    said = capsys.readouterr()
    assert "M parameters, fp8 128x128)" in said.err
    assert "activations stay wide" in said.err and "activations" not in said.out
    assert kog.main([*argv, "--quiet"]) == 0
    quiet = capsys.readouterr()
    assert quiet.out == said.out and quiet.err == ""
