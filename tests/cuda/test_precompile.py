"""The kernel's compiler begins before torch is imported, with the text that the backend asks for."""

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch

from kog_triton import generate, precompile
from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import early, prompts_beside
from kog_triton.backends.cuda import precompile as cuda
from kog_triton.backends.cuda.layout.columns import COUNTS, POSITIONS
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.nvidia_driver import read_gpu
from kog_triton.bench.model import open_model
from kog_triton.checkpoint import hub
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.demo import checkpoint_path
from kog_triton.errors import DeviceError, ModelError
from kog_triton.schedule.topology import find_gpu
from kog_triton.text import Tokenizer
from tests.lib.cuda_walk import FiberBackend
from tests.lib.fake_checkpoint import make_checkpoint
from tests.lib.gpus import H200_SEEN


@pytest.fixture
def begun(monkeypatch):
    """What the CUDA backend began, on a machine with an H200 and cores enough, nothing kept: texts and sources."""
    done: list[tuple[str, str]] = []
    monkeypatch.setattr(early, "is_kept", lambda *_: False)
    monkeypatch.setattr(cuda, "read_gpu", lambda: H200_SEEN)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(cuda, "begin_cubin", lambda header, source, arch: done.append((header, source)))
    return done


class Asking(FiberBackend):
    """Notes the texts that it asks its compiler for, of all its kernels."""

    column_counts, columns_ahead, chunk_positions = COUNTS, True, POSITIONS
    early_kernels = deep_kernel = True
    prompt_kernels = prompts_beside.PromptsBeside.prompt_kernels

    def __init__(self, *arguments, **options):
        self.asked = set()
        super().__init__(*arguments, **options)
        self.settle()

    def _compile(self, source, layout):
        self.asked.add((render(layout), source))

    def _compile_products(self):
        prompts_beside.PromptsBeside._compile_products(self)

    def _open_library(self, weights, lowering):
        """None: its kernels are asked for, and run on no CPU."""

    def _load(self, source, entry, layout):
        return None


@pytest.mark.parametrize("name", ["auto", "cuda"])
@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, BackendOptions()),
        (
            {"device": "nvidia", "max_model_len": 48, "num_slots": 3},
            BackendOptions(device="nvidia", max_context=48, num_slots=3),
        ),
        ({"num_slots": 8}, BackendOptions(num_slots=8)),
        ({"device": "h200", "dtype": "bfloat16"}, BackendOptions(device="h200", dtype="bf16")),
        ({"num_gpus": 2}, BackendOptions(num_gpus=2)),
    ],
)
def test_what_is_begun_is_what_the_backend_asks_for(begun, monkeypatch, name, asked, options):
    both, of_prompts = set(), set()
    monkeypatch.setattr(prompts_beside, "begin_cubin", lambda *_: None)
    monkeypatch.setattr(prompts_beside, "compile_cubin", lambda header, source, _: of_prompts.add((header, source)))
    for prefill in ("kernel", "library"):
        precompile.precompile(name, **asked, prefill=prefill)
        backend = Asking(Checkpoint.open(checkpoint_path()), replace(options, prefill=prefill), num_blocks=0)
        assert begun[0][1] == "decode.cu"
        want = backend.asked | of_prompts
        assert len(begun) == len(set(begun)) and set(begun) == want
        outputs = prefill == "library" and options.num_gpus > 1
        assert ("rank_outputs.cu" in {source for _, source in begun}) is outputs
        both |= want
        of_prompts.clear()
        begun.clear()
    precompile.precompile(name, **asked)
    one_token = [("kTokensOnly = true" in text, source) for text, source in begun if source in ONE_TOKEN]
    assert one_token == [(early, source) for early in (True, False) for source in ONE_TOKEN]
    assert set(begun) == both


SEVERAL = ["columns.cu"] * 4
ASKED = ["decode.cu", "head_steps.cu", *SEVERAL]
ONE_TOKEN, PROMPTS = ("decode.cu", "head_steps.cu"), ("prompt.cu", "short_pass.cu")


@pytest.mark.parametrize(("cores", "kernels"), [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_python_keeps_a_core_while_kernels_compile(begun, monkeypatch, cores, kernels):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    precompile.precompile("cuda", num_slots=8)
    assert [source for _, source in begun] == ASKED[:kernels]


@pytest.mark.parametrize("cores", [6, 11, 12, 16, 99])
def test_early_kernels_come_first_then_what_takes_longest_where_cores_are_left(begun, monkeypatch, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    precompile.precompile("cuda", num_slots=8)
    sources = [source for _, source in begun]
    assert sources[:2] == ["decode.cu", "head_steps.cu"]  # the early ones
    prompts = [source for source in sources if source in PROMPTS]
    assert prompts  # short ones too, of a model that has passes
    whole = ["decode.cu", "head_steps.cu"]
    crowded = cores < 12  # six kernels are half of them
    assert sources[2:] == (prompts + ASKED if crowded else SEVERAL + prompts + whole)
    columns = [int(re.search(r"kColumns = (\d+)", text).group(1)) for text, source in begun if source == "columns.cu"]
    assert columns[1:] == [8, 4, 2]  # the first is a prompt's chunks


def test_a_published_shape_is_begun_as_its_random_weights_ask(begun):
    precompile.precompile("cuda", shape="qwen3-0.6b", dtype="half", max_model_len=64)
    spec = open_model(None, "qwen3-0.6b", torch.device("cpu"), "fp16").weights.spec
    lowering = cuda.lower(cuda.build(spec), find_gpu("h200"))
    layout = cuda.lay_out(lowering, 64)
    assert begun[0] == (render(replace(layout, tokens_only=True)), "decode.cu")
    assert begun.index((render(layout), "decode.cu")) > 1
    assert not any("kDeep = true" in text for text, _ in begun)


def test_random_weights_of_a_format_begin_no_kernel_of_wide_ones(begun, monkeypatch):
    asked = {"shape": "qwen3-0.6b", "dtype": "fp16", "weights": "int4-g128"}
    precompile.precompile("cuda", **asked)
    assert begun == []
    specs = []
    monkeypatch.setattr(cuda, "precompile", lambda spec, options: specs.append(spec))
    precompile.precompile("cuda", **(asked | {"dtype": "auto"}))
    opened = open_model(None, "qwen3-0.6b", torch.device("cpu"), format="int4-g128").weights.spec
    assert specs == [opened] and opened.narrow


def test_the_kernel_of_deep_positions_is_begun_last(begun):
    precompile.precompile("cuda", shape="qwen3-0.6b", dtype="half", max_model_len=2048)
    spec = open_model(None, "qwen3-0.6b", torch.device("cpu"), "fp16").weights.spec
    layout = cuda.lay_out(cuda.lower(cuda.build(spec), find_gpu("h200")), 2048)
    assert begun[-1] == (render(replace(layout, deep=True)), "decode.cu")
    assert sum("kDeep = true" in text for text, _ in begun) == 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("reference", {}),
        ("triton", {}),
        ("auto", {"device": "cpu"}),
        ("auto", {"device": "mi300x"}),
        ("auto", {"device": "h100"}),
        ("cuda", {"device": "amd"}),
        ("cuda", {"device": "h2OO"}),
        ("cuda", {"dtype": "fp32"}),
        ("cuda", {"dtype": "int3"}),
        ("cuda", {"num_gpus": 5}),
        ("cuda", {"max_model_len": 0}),
        ("cuda", {"max_model_len": 1 << 20}),
        ("cuda", {"model": ""}),
    ],
)
def test_nothing_is_begun_for_another_backend_or_what_will_be_refused(begun, name, changes):
    precompile.precompile(name, **changes)
    assert begun == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_nothing_is_begun_for_another_gpu(begun, monkeypatch, arch):
    monkeypatch.setattr(cuda, "read_gpu", lambda: replace(H200_SEEN, name="NVIDIA X", arch=arch))
    precompile.precompile("cuda")
    assert begun == []


def test_what_is_wrong_is_left_to_the_opening(begun, tmp_path, monkeypatch, caplog):
    caplog.set_level("DEBUG", "kog_triton.precompile")
    (tmp_path / "config.json").write_text("{")
    (tmp_path / hub.SINGLE).touch()
    precompile.precompile("cuda", tmp_path)
    said = "nothing is compiled beforehand: "
    assert caplog.messages[-1].startswith(f"{said}ModelError: {tmp_path}/config.json")
    with pytest.raises(ModelError):
        Checkpoint.open(tmp_path)

    def no_gpu():
        raise DeviceError("the CUDA driver gives no GPU")

    monkeypatch.setattr(cuda, "read_gpu", no_gpu)
    precompile.precompile("cuda")
    broken = EntryPoint("cuda", "no_such_module:precompile", precompile.GROUP)
    monkeypatch.setattr(precompile, "entry_points", lambda group: [broken])
    precompile.precompile("cuda")
    assert [m.removeprefix(said) for m in caplog.messages[1:]] == [
        "DeviceError: the CUDA driver gives no GPU",
        "ModuleNotFoundError: No module named 'no_such_module'",
    ]
    assert begun == []


def test_a_model_that_names_no_type_waits_for_its_files(begun, tmp_path):
    folder = make_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for key in ("torch_dtype", "dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    precompile.precompile("cuda", folder)
    assert begun == []
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    precompile.precompile("cuda", folder)
    assert begun[0][1] == "decode.cu"


def test_a_hub_model_is_begun_if_it_is_here_and_nothing_is_fetched(begun, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_download", None)
    assert hub.local_file("org/name", "config.json") is None
    precompile.precompile("cuda", "org/name")
    assert begun == []
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    text = (checkpoint_path() / "config.json").read_text()
    (snapshot / "config.json").write_text(text)
    assert hub.local_file("org/name", "config.json") == snapshot / "config.json"
    precompile.precompile("cuda", "org/name")
    assert begun == []  # its weights are not here
    (snapshot / hub.INDEX).touch()
    precompile.precompile("cuda", "org/name")
    assert begun[0][1] == "decode.cu"


@pytest.mark.parametrize("model", ["nowhere", "/no/such/folder", "a/b/c", "", "\0", "org/file"])
def test_what_is_no_model_has_no_file(model, monkeypatch):
    monkeypatch.chdir(checkpoint_path())  # "" is not the folder where we are
    assert hub.local_file(model, "config.json") is None


GENERATE = "from kog_triton.generate import main; main(['--backend', 'reference', {}])"


@pytest.mark.parametrize(
    "command",
    [
        GENERATE.format("'-p', 'a', '-m', '1'"),
        GENERATE.format("'--interactive'"),
        "from kog_triton.bench.one_start import one_start\n"
        "one_start(0, 'reference', None, None, None, '', 1, 'auto', None)",
    ],
    ids=["generate", "interactive", "bench startup"],
)
def test_commands_begin_before_torch_is_imported(command):
    """Another function in the place of theirs says what was imported when it was called."""
    code = (
        "import sys\n"
        "from kog_triton import precompile\n"
        "def note(backend, *args, **others):\n"
        "    print('begun', 'torch' in sys.modules, backend, file=sys.stderr)\n"
        "precompile.precompile = note\n"
    )
    done = subprocess.run([sys.executable, "-c", code + command], input="", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("begun")]
    assert lines == ["begun False reference"]


def test_the_compiler_is_begun_before_the_tokenizer_is_read(monkeypatch, capsys):
    order, load = [], Tokenizer.load
    monkeypatch.setattr(precompile, "precompile", lambda *args, **others: order.append("compiler"))
    monkeypatch.setattr(Tokenizer, "load", lambda folder: order.append("tokenizer") or load(folder))
    assert generate.main(["-p", "a", "-m", "1", "--backend", "reference"]) == 0
    assert order[:2] == ["compiler", "tokenizer"] and order.count("compiler") == 1


def test_a_compiler_that_is_not_done_says_nothing_behind_an_error(monkeypatch, capsys):
    log = logging.getLogger("kog_triton.compilers")

    def begin(*args, **others):
        log.info("compiling")

    monkeypatch.setattr(precompile, "precompile", begin)
    assert generate.main(["-p", "a", "--backend", "reference", "--max-model-len", "99999"]) == 2
    log.info("compiled")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "compiling" and said[-1].startswith("error: max_model_len is 99999")


def test_the_backends_own_part_imports_no_torch():
    code = (
        "import sys\n"
        "import kog_triton.backends.cuda.precompile as cuda\n"
        "from kog_triton import precompile\n"
        "from tests.lib.gpus import H200_SEEN\n"
        "done = []\n"
        "cuda.read_gpu = lambda: H200_SEEN\n"
        "cuda.begin_cubin = lambda header, source, arch: done.append(source)\n"
        "precompile.precompile('auto')\n"
        "print(done[0], 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("decode.cu False\n", "")


def test_without_a_driver_the_reason_is_told(monkeypatch):
    def refuse(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", refuse)
    with pytest.raises(DeviceError, match="no CUDA driver"):
        read_gpu()


@pytest.mark.gpu
def test_the_first_gpu_is_the_one_that_torch_takes():
    seen, torchs = read_gpu(), torch.cuda.get_device_properties(0)
    assert (seen.name, seen.num_sms) == (torchs.name, torchs.multi_processor_count)
    assert (seen.memory_bytes, seen.l2_bytes) == (torchs.total_memory, torchs.L2_cache_size)
    assert seen.shared_bytes == torchs.shared_memory_per_block_optin


FIRST = """
import sys
from kog_triton.backends.cuda import jit
from kog_triton.precompile import precompile
precompile("auto")
assert jit._begun and "torch" not in sys.modules
from kog_triton import LLM
with LLM() as llm:
    assert llm.choice.name == "cuda"
    print(llm.generate("def f(", llm.get_default_sampling_params(temperature=0, max_tokens=16))[0].outputs[0].text)
    llm.engine.backend.settle()  # a kernel that makes tokens alone may have been sooner than the whole one
"""
SECOND = "import sys; from kog_triton.generate import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.gpu
def test_a_first_start_finds_what_was_begun_and_the_next_one_what_is_kept(tmp_path):
    def start(code, *argv):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv],
            capture_output=True,
            text=True,
            timeout=300,
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "CUDA_CACHE_DISABLE": "1"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    first, _ = start(FIRST)
    second, said = start(SECOND, "-p", "def f(", "--temp", "0", "-m", "16")
    assert first == second + "\n" and second
    assert "backend cuda" in said and "decode.cu" not in said
