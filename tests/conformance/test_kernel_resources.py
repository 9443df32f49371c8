"""Who knows what its kernel takes: the CUDA driver's answers, Triton's, and what a bench record keeps of them."""

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda import driver
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.resources import ResourceReporter, Resources
from kog_triton.backends.triton import TritonBackend
from kog_triton.bench import cli as bench
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import DeviceError
from tests.lib.cuda_walk import FiberBackend
from tests.lib.ring_walker import spec_of
from tests.lib.triton_cases import Case, backend_of, plain

SCHEMA = Path(bench.__file__).with_name("result.schema.json")
HELD = Resources(168, 16, 200_000)


class Driver:
    """libcuda as far as a kernel is loaded and asked; attributes by their numbers in cuda.h."""

    asked = None  # the function's handle

    def __init__(self, attributes):
        self._attributes = attributes

    def cuModuleLoadData(self, module, cubin):
        return 0

    def cuModuleGetFunction(self, function, module, name):
        function._obj.value = 77
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        return 0

    def cuFuncGetAttribute(self, value, attribute, function):
        self.asked = function.value
        value._obj.value = self._attributes.get(attribute, 0)
        return 0 if attribute in self._attributes else 1

    def cuGetErrorString(self, status, text):
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"invalid argument"


@pytest.fixture
def loaded(monkeypatch):
    """A kernel with 200,000 bytes of dynamic shared memory whose driver knows some attributes."""

    def load(attributes):
        library = Driver(attributes)
        monkeypatch.setattr(driver, "_library", lambda: library)
        return driver.Kernel(b"cubin", "kog_decode", 200_000, torch.device("cpu")), library

    return load


def test_the_cuda_driver_is_asked_for_static_and_told_dynamic_memory(loaded):
    kernel, library = loaded({1: 400, 3: 16, 4: 168})
    assert kernel.resources() == Resources(registers=168, local_bytes=16, shared_bytes=200_400)
    assert library.asked == 77


def test_an_answer_that_fails_is_an_error(loaded):
    kernel, _ = loaded({1: 400, 4: 168})
    with pytest.raises(DeviceError, match=r"cuFuncGetAttribute: CUDA error 1 \(invalid argument\)"):
        kernel.resources()


def test_the_words_name_the_units():
    assert str(HELD) == ("168 registers and 16 bytes of local memory a thread, 200,000 bytes of shared memory a block")


def test_triton_tells_of_the_kernel_that_ran():
    """Its spills are words of four bytes; nothing compiled, as in the interpreter, is nothing to tell."""
    backend = backend_of(Case(plain(1)))
    assert backend.resources() is None
    backend._compiled = SimpleNamespace(n_regs=255, n_spills=6, metadata=SimpleNamespace(shared=65_536))
    assert backend.resources() == Resources(255, 24, 65_536)


def test_who_reports():
    assert issubclass(FiberBackend, ResourceReporter) and issubclass(TritonBackend, ResourceReporter)
    assert not issubclass(ReferenceBackend, ResourceReporter)
    backend = FiberBackend(RandomWeights(spec_of()), BackendOptions(max_context=64))
    assert backend.resources() is None, "an emulated kernel has no registers"


def test_a_record_keeps_what_is_known(monkeypatch, tmp_path, capsys):
    """And a backend that fails to say it loses no time that was measured."""
    file = tmp_path / "record.json"
    few = ("--rounds=1", "--warmup=1", "--max-tokens=2", "--depth=3", f"--json={file}")

    def measured():
        assert bench.main(["decode", "--backend=reference", *few]) == 0
        record = json.loads(file.read_text())
        jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(record)
        (row,) = record["rows"]
        assert row["status"] == "timed"
        return row, capsys.readouterr().out

    assert "resources" not in measured()[0]
    monkeypatch.setattr(ReferenceBackend, "resources", lambda self: HELD, raising=False)
    row, out = measured()
    assert row["resources"] == {"registers": 168, "local_bytes": 16, "shared_bytes": 200_000}
    assert f"reference: {HELD}" in " ".join(out.split())
    monkeypatch.setattr(ReferenceBackend, "resources", lambda self: 1 // 0)
    row, _ = measured()
    assert "resources" not in row and "division" in row["note"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [CudaBackend, TritonBackend])
def test_what_a_hopper_gpu_says(kind):
    """No thread has more than 255 registers, no block more than 227 KiB of shared memory."""
    backend = kind(RandomWeights(spec_of()), BackendOptions(max_context=64))
    backend.forward_logits([3, 4])
    held = backend.resources()
    assert 32 <= held.registers <= 255 and held.local_bytes < 1024
    assert 0 < held.shared_bytes <= 227 * 1024
    if kind is CudaBackend:
        assert held.shared_bytes >= backend.layout.shared_bytes
    backend.close()
