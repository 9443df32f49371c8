"""The kernel's compiler begins before torch is imported, with the text that the backend asks for."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from cuda_walk import FiberBackend
from fake_checkpoint import make_checkpoint
from kog_triton.backends.cuda import precompile as cuda
from kog_triton.backends.cuda.header import render

from kog_triton import hub, precompile
from kog_triton.backends import BackendOptions
from kog_triton.bench.model import open_model
from kog_triton.checkpoint import Checkpoint
from kog_triton.demo import checkpoint_path
from kog_triton.errors import DeviceError, ModelError


@pytest.fixture
def begun(monkeypatch):
    """What the CUDA backend began to compile, on a machine with an H200."""
    headers: list[str] = []
    monkeypatch.setattr(cuda, "first_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(cuda, "begin_cubin", headers.append)
    return headers


class Asking(FiberBackend):
    """Notes the text that it asks its compiler for."""

    def _compile(self, source, layout):
        self.asked = render(layout)

    def _load(self, source, entry, layout):
        return None


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize(
    "options",
    [
        BackendOptions(),
        BackendOptions(device="nvidia", max_context=48, num_slots=3),
        BackendOptions(device="h200", dtype="bf16", prefill="kernel"),
    ],
)
def test_what_is_begun_is_what_the_backend_asks_for(begun, name, options):
    precompile.precompile(name, options)
    backend = Asking(Checkpoint.open(checkpoint_path()), options, num_blocks=0)
    assert begun == [backend.asked]


def test_a_published_shape_is_begun_as_its_random_weights_ask(begun):
    options = BackendOptions(device="nvidia", max_context=64, dtype="fp16")
    precompile.precompile("cuda", options, shape="qwen3-0.6b")
    spec = open_model(None, "qwen3-0.6b", torch.device("cpu"), "fp16").weights.spec
    lowering = cuda.lower(cuda.build(spec), cuda.find_gpu("h200"))
    assert begun == [render(cuda.lay_out(lowering, 64))]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("reference", {}),
        ("triton", {}),
        ("auto", {"device": "cpu"}),
        ("cuda", {"device": "amd"}),
        ("cuda", {"dtype": "fp32"}),
        ("cuda", {"dtype": "int3"}),
    ],
)
def test_nothing_is_begun_for_another_backend_or_what_this_one_refuses(begun, name, changes):
    precompile.precompile(name, BackendOptions(**changes))
    assert begun == []


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB", "NVIDIA Unheard Of"])
def test_nothing_is_begun_for_another_gpu(begun, monkeypatch, gpu):
    monkeypatch.setattr(cuda, "first_gpu", lambda: gpu)
    precompile.precompile("cuda", BackendOptions())
    assert begun == []


def test_what_is_wrong_is_left_to_the_opening(begun, tmp_path, monkeypatch, caplog):
    caplog.set_level("DEBUG", "kog_triton.precompile")
    (tmp_path / "config.json").write_text("{")
    precompile.precompile("cuda", BackendOptions(), tmp_path)
    assert caplog.messages[-1].startswith(f"nothing is compiled beforehand: {tmp_path}/config.json")
    with pytest.raises(ModelError):
        Checkpoint.open(tmp_path)

    def no_gpu():
        raise DeviceError("the CUDA driver gives no GPU")

    monkeypatch.setattr(cuda, "first_gpu", no_gpu)
    precompile.precompile("cuda", BackendOptions())
    broken = EntryPoint("cuda", "no_such_module:precompile", precompile.GROUP)
    monkeypatch.setattr(precompile, "entry_points", lambda group: [broken])
    precompile.precompile("cuda", BackendOptions())
    assert [m.split(": ", 1)[1] for m in caplog.messages[1:]] == [
        "the CUDA driver gives no GPU",
        "No module named 'no_such_module'",
    ]
    assert begun == []


def test_a_model_that_names_no_type_waits_for_its_files(begun, tmp_path):
    folder = make_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for key in ("torch_dtype", "dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    precompile.precompile("cuda", BackendOptions(), folder)
    assert begun == []
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    precompile.precompile("cuda", BackendOptions(), folder)
    assert len(begun) == 1


def test_a_hub_model_is_begun_if_it_is_here_and_nothing_is_fetched(begun, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_download", None)
    assert hub.local_file("org/name", "config.json") is None
    precompile.precompile("cuda", BackendOptions(), "org/name")
    assert begun == []
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    text = (checkpoint_path() / "config.json").read_text()
    (snapshot / "config.json").write_text(text)
    assert hub.local_file("org/name", "config.json") == snapshot / "config.json"
    precompile.precompile("cuda", BackendOptions(), "org/name")
    assert len(begun) == 1


@pytest.mark.parametrize("model", ["nowhere", "/no/such/folder", "a/b/c", "", "\0"])
def test_what_is_no_model_has_no_file(model):
    assert hub.local_file(model, "config.json") is None


@pytest.mark.parametrize(
    "command",
    [
        "from kog_triton.generate import main; main(['-p', 'a', '--backend', 'reference', '-m', '1'])",
        "import sys; sys.argv[1:] = ['--started', '0', '--backend', 'reference']\n"
        "from kog_triton.bench.one_start import main; main()",
    ],
    ids=["generate", "bench startup"],
)
def test_commands_begin_before_torch_is_imported(command, tmp_path):
    """The compiler's function in the place of theirs says what was imported when it was called."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from kog_triton import precompile\n"
        "def note(*args):\n"
        "    print('begun', 'torch' in sys.modules, args[0], file=sys.stderr)\n"
        "precompile.precompile = note\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
         f"import sitecustomize\n{command}"],
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "begun" in line] == [
        "begun False reference"
    ]


def test_the_backends_own_part_imports_no_torch():
    code = (
        "import sys\n"
        "import kog_triton.backends.cuda.precompile as cuda\n"
        "from kog_triton import precompile\n"
        "from kog_triton.backends import BackendOptions\n"
        "cuda.first_gpu, headers = lambda: 'NVIDIA H200', []\n"
        "cuda.begin_cubin = headers.append\n"
        "precompile.precompile('auto', BackendOptions())\n"
        "print(len(headers), 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1 False\n", "")


def test_without_a_driver_the_reason_is_told(monkeypatch):
    def refuse(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", refuse)
    with pytest.raises(DeviceError, match="no CUDA driver"):
        cuda.first_gpu()


@pytest.mark.gpu
def test_the_first_gpu_is_the_one_that_torch_takes():
    assert cuda.first_gpu() == torch.cuda.get_device_name()


@pytest.mark.gpu
def test_a_first_start_compiles_once_and_says_the_same_as_the_second(tmp_path):
    """By the command: what was begun before torch is what the backend waits for."""

    answers = []
    for _ in range(2):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "kog_triton.generate",
                "-p",
                "def f(",
                "--temp",
                "0",
                "-m",
                "16",
            ],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CUDA_CACHE_DISABLE": "1"},
        )
        assert done.returncode == 0, done.stderr
        answers.append((done.stdout, done.stderr.splitlines()))
    (first, said), (second, later) = answers
    decode = [line for line in said if "decode.cu" in line]
    assert first == second and first
    assert [line.split()[0] for line in decode] == ["compiling", "compiled"]
    assert not any("decode.cu" in line for line in later)
    assert list(Path(tmp_path, "kog_triton", "cuda").glob("*.cubin"))
