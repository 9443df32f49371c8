"""The check of a new GPU by requests, in the executor: kernels of several tokens a step and of ranks pass it, a matrix
instruction whose lanes are mistaken does not, and objects made elsewhere are all that it needs.

Most tests are of a model so small that its kernels are compiled for others, too (test_hip_backend.py).
"""

from dataclasses import replace

import pytest
import torch

from kog_triton import request_check, stage_check
from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.stages import StageRunner
from kog_triton.backends.hip import backend, prebuild, toolchain
from kog_triton.backends.hip.backend import HipBackend
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.errors import DeviceError
from kog_triton.model.shapes import named_shape
from kog_triton.model.small import small_model
from kog_triton.request_check import check_requests
from kog_triton.schedule.topology import GPUS
from kog_triton.stage_check import check_new_gpu
from tests.lib.fake_hip import FakeHip
from tests.lib.fake_hip_gpus import FakeGpus
from tests.lib.gfx942.executor import WEAK
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.hip_machine import install, save_model
from tests.lib.slow import some_always

GPU = replace(GPUS["mi300x"], num_blocks=8)
ONE, TWO, CHUNKS = ("the kernel of one token", "the kernel of 2 requests a step", "the kernel of 2 tokens of a prompt")
# Of a header of the columns' products (include/kog): what stands there -> what is planted.
ROWS = "a lane takes another's rows of what comes out"
LANES = {
    ROWS: (
        "mma/products.h",
        "int row = kRows == 8 ? b.in_warp / 16 * 4 : 0;",
        "int row = kRows == 8 ? (1 - b.in_warp / 16) * 4 : 0;",
    ),
    "a lane has another's eight values of K": (
        "mma/operands.h",
        "S::first_value(b) / kThreadValues + b.in_warp / S::kSetColumns;",
        "S::first_value(b) / kThreadValues + (b.in_warp / S::kSetColumns ^ 1);",
    ),
    "a lane has another's column": (
        "mma/operands.h",
        "thread / kSetColumns * kTokens + thread % kSetColumns % kTokens;",
        "thread / kSetColumns * kTokens + (thread + 1) % kSetColumns % kTokens;",
    ),
}


class Unlaunched:
    """A kernel that is loaded and no more."""

    def __init__(self, code):
        assert code == b"a kernel"

    def close(self):
        pass


class Silent:
    """A reference with which everything agrees."""

    def __init__(self, weights, options):
        pass

    def run_stage(self, stage, layer, state):
        return {}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    def of(vocab_size):
        folder = tmp_path_factory.mktemp("model")
        return Checkpoint.open(save_model(folder / "tiny", vocab_size)).spec

    return of


@pytest.fixture
def several(monkeypatch):
    """Opens GPUs, of a HIP backend with kernels of so many requests a step and positions of a prompt."""

    def opened(counts=(2,), positions=2, tokens=2, gpus=1, **conditions):
        fake = FakeHip(**conditions) if gpus == 1 else FakeGpus(gpus, **conditions)
        install(fake, monkeypatch, 8 // gpus)
        monkeypatch.setattr(HipBackend, "column_counts", counts)
        monkeypatch.setattr(HipBackend, "chunk_positions", positions)
        monkeypatch.setattr(request_check, "CHOSEN", tokens)
        return fake

    return opened


def planted(monkeypatch, folder, header, before, after):
    text = (INCLUDES[0] / "kog" / header).read_text()
    assert text.count(before) == 1
    path = folder / "kog" / header
    path.parent.mkdir(parents=True)
    path.write_text(text.replace(before, after))
    monkeypatch.setattr(toolchain, "INCLUDES", (folder, *INCLUDES))


def test_requests_together_and_a_prompt_in_chunks_pass(several, tiny):
    fake, spec = several(), tiny(50)
    assert check_requests(HipBackend, spec, "here", num_slots=2) == [ONE, TWO, CHUNKS]
    # the self-test, a request alone, one launch of two, and a prompt with its first token ahead of the next
    assert fake.launches == 1 + 1 + 1 + 2
    assert check_requests(HipBackend, spec, "here") == [ONE, CHUNKS]


@pytest.mark.parametrize(("fault", "kernel"), some_always([(f, k) for f in LANES for k in (TWO, CHUNKS)], (ROWS, TWO)))
def test_lanes_that_are_mistaken_are_refused(several, tiny, monkeypatch, tmp_path, fault, kernel):
    several(positions=2 if kernel == CHUNKS else 0)
    planted(monkeypatch, tmp_path, *LANES[fault])
    with pytest.raises(DeviceError) as told:
        check_requests(HipBackend, tiny(50), "an MI300X", num_slots=2 if kernel == TWO else 1)
    said = str(told.value)
    assert said.startswith(f"backend hip: {kernel} ") and "\n" not in said
    assert " on an MI300X (" in said and said.endswith("choose another backend, and report this")


@pytest.mark.parametrize(("chunk", "what"), [(False, "2 columns"), (True, "chunks")])
def test_a_kernel_that_cannot_be_had_is_named(several, tiny, monkeypatch, chunk, what):
    compile = HipBackend._compile

    def refuses(self, source, layout):
        if layout.columns > 1 and layout.chunk is chunk:
            raise DeviceError("no compiler")
        return compile(self, source, layout)

    several()
    monkeypatch.setattr(HipBackend, "_compile", refuses)
    with pytest.raises(DeviceError) as told:
        check_requests(HipBackend, tiny(50), "here", num_slots=2)
    assert str(told.value) == f"backend hip has no kernel of {what} for mi300x: the log says why"


def test_all_ranks_pass_and_a_gpu_that_is_wrong_is_not_served(several, tiny, monkeypatch):
    fake, spec = several(gpus=2, memory=WEAK), tiny(52)
    monkeypatch.setattr(request_check, "CHOICES", request_check.CHOICES[:1])
    monkeypatch.setattr(request_check, "CONTEXT", 64)  # of test_hip_gpus.py's kernels
    ranks = "the kernel of 2 ranks"
    assert check_requests(HipBackend, spec, "2 x here", 2, 2) == [ranks, TWO, CHUNKS]
    assert fake.launches == 2 + 1 + 2 + 1 + 2, fake.why
    allocate = HipBackend._allocate

    def damaged(self, weights):
        memory = allocate(self, weights)
        memory.each[1].weights.zero_()
        return memory

    monkeypatch.setattr(HipBackend, "_allocate", damaged)
    with pytest.raises(DeviceError, match=f"backend hip: {ranks} (computes wrong|fails) on 2 x here"):
        check_requests(HipBackend, spec, "2 x here", 2, 2)


@pytest.mark.parametrize("gpus", [1, 2])
def test_prebuild_writes_all_that_the_check_asks_for(monkeypatch, gpus):
    """Of a model of full size, whose small one is opened; nothing is compiled or run."""
    spec, asked = named_shape("llama-3.2-1b"), []
    install(FakeGpus(gpus), monkeypatch, 8)
    monkeypatch.setattr(HipBackend, "column_counts", CudaBackend.column_counts)
    monkeypatch.setattr(HipBackend, "chunk_positions", CudaBackend.chunk_positions)
    monkeypatch.setattr(backend, "code_object", lambda *what: asked.append(what) or b"a kernel")
    monkeypatch.setattr(HipBackend, "_load", lambda self, *what: Unlaunched(self._code(what[0], what[2])))
    monkeypatch.setattr(StageRunner, "run", lambda *what: {})
    monkeypatch.setattr(stage_check, "find_backend", lambda name: Silent)
    monkeypatch.setattr(request_check, "serve", lambda ours, *requests: [()] * len(requests))
    monkeypatch.setattr(request_check, "_compare", lambda *what: "")
    monkeypatch.setattr(stage_check, "_check_choice", lambda *what: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(stage_check, "gpu_of", lambda device: GPU)
    check_new_gpu(HipBackend, spec, BackendOptions(num_slots=8, num_gpus=gpus))
    sources = {source for _, source, _ in asked}
    assert sources == {"decode.hip", "stage.hip", "columns.hip"}
    written = set(prebuild.sources(spec, GPU, 512, gpus))
    assert {(header, source) for header, source, _ in asked} <= written


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("llama-3.2-1b", "bf16"), ("qwen3-0.6b", "fp16"), ("laneformer-2b", "fp16")]
)
def test_the_small_model_of_a_named_shape_passes(several, name, dtype):
    several((2, 4, 8), 8)
    small = small_model(named_shape(name), dtype)
    assert len(check_requests(HipBackend, small, "here", num_slots=8)) == 5
