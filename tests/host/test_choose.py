"""Which backend "auto" takes: torch, driver, compiler, Triton are faked; the classes and what they say are real."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from kog_triton import doctor
from kog_triton.backends import unseen_gpu
from kog_triton.backends.choose import choose, look_at, ranked
from kog_triton.backends.cuda import backend as cuda
from kog_triton.errors import DeviceError, RequestError
from kog_triton.schedule.topology import Seen
from tests.lib.fake_backend import install

# name, capability or AMD's architecture, what "auto" takes
GPUS = {
    "NVIDIA H200": ((9, 0), "cuda"),
    "NVIDIA H100 80GB HBM3": ((9, 0), "cuda"),
    "NVIDIA H100 PCIe": ((9, 0), "cuda"),
    "NVIDIA A100-SXM4-80GB": ((8, 0), "triton"),
    "NVIDIA L40S": ((8, 9), "triton"),
    "NVIDIA B200": ((10, 0), "triton"),
    "NVIDIA GeForce RTX 5090": ((12, 0), "triton"),
    "NVIDIA GeForce RTX 9999": ((15, 0), "triton"),
    "AMD Instinct MI300X": ("gfx942:sramecc+:xnack-", "triton"),
    "AMD Radeon RX 7900 XTX": ("gfx1100", "reference"),
    "Tesla T4": ((7, 5), "reference"),
    "Tesla V100-SXM2-16GB": ((7, 0), "reference"),
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Lets torch see one of GPUS, or none; a compiler and Triton are there unless they are named as missing.

    `driver` is what the driver gives, as (name, architecture), and `build` the CUDA or ROCm of torch's build.
    """
    for variable in {name for names in unseen_gpu.HIDING.values() for name in names}:
        monkeypatch.delenv(variable, raising=False)

    def be(name="", compiler=True, triton=True, driver=None, build=None):
        def read_gpu():
            if driver is None:
                raise DeviceError("no CUDA driver")
            return Seen(driver[0], "nvidia", driver[1], 132, 227 << 10, 141 * 10**9)

        monkeypatch.setattr(unseen_gpu, "read_gpu", read_gpu)
        monkeypatch.setattr(unseen_gpu, "NVIDIA_DEVICE", tmp_path / "nvidia0")
        monkeypatch.setattr(unseen_gpu, "AMD_NODES", tmp_path / "nodes")
        monkeypatch.setattr(torch.version, "cuda", build)
        arch = GPUS[name][0] if name else ()
        amd = isinstance(arch, str)
        monkeypatch.setattr(torch.version, "hip", "7.0" if amd else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(name))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: arch)
        properties = SimpleNamespace(gcnArchName=arch)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

        def compiler_name():
            if not compiler:
                raise DeviceError("no CUDA compiler")
            return "nvrtc 13.0"

        monkeypatch.setattr(cuda, "compiler_name", compiler_name)
        found = importlib.util.find_spec("json") if triton else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda module: found)

    return be


@pytest.mark.parametrize("name", GPUS)
def test_auto_takes_the_fastest_that_a_gpu_runs(machine, name):
    machine(name)
    choice = choose("auto")
    assert choice.name == GPUS[name][1]
    if choice.name == "reference":  # and says what this GPU lacks
        assert f"triton: {name} is " in choice.reason


def test_without_a_gpu_it_is_the_reference(machine):
    machine()
    choice = choose("auto")
    assert choice.name == "reference"
    assert choice.reason == "cuda: torch sees no NVIDIA GPU; triton: torch sees no GPU"


def test_a_hopper_without_a_cuda_compiler_takes_triton_and_says_why(machine):
    machine("NVIDIA H200", compiler=False)
    choice = choose("auto")
    assert (choice.name, choice.reason) == ("triton", "cuda: no CUDA compiler")


@pytest.mark.parametrize("name", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X"])
def test_a_usable_gpu_that_lacks_software_is_said_and_never_a_slow_cpu_unasked(machine, name):
    machine(name, compiler=False, triton=False)
    with pytest.raises(DeviceError) as told:
        choose("auto")
    words = str(told.value)
    assert words.startswith("the GPU of this machine is not used: ") and "\n" not in words
    assert ("torch's ROCm build again" if "AMD" in name else 'pip install "kog-triton[cuda]"') in words
    assert words.endswith("or choose --backend reference, which is slow")
    assert choose("auto", "cpu").name == choose("reference").name == "reference"


H200 = ("NVIDIA H200", "sm_90a")
REFUSED = (
    "the GPU of this machine is not used: torch {} does not see the {} of this machine: {}; "
    "or choose --backend reference, which is slow"
)


@pytest.mark.parametrize(
    ("driver", "build", "advice"),
    [
        (H200, None, "it is built without CUDA: install torch's CUDA build"),
        (("NVIDIA L40S", "sm_89"), None, "it is built without CUDA: install torch's CUDA build"),
        (H200, "13.0", "it is built for CUDA 13.0: install a driver for that, or another build"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_said_and_never_a_slow_cpu_unasked(machine, driver, build, advice):
    machine(driver=driver, build=build)
    advice = f"{advice} of torch" if build else advice
    said = REFUSED.format(torch.__version__, driver[0], f"{advice} ({unseen_gpu.WHERE})")
    for device in ("", "nvidia"):
        with pytest.raises(DeviceError) as told:
            choose("auto", device)
        assert str(told.value) == said
    assert choose("auto", "cpu").name == choose("reference").name == "reference"
    assert doctor.unseen() == f"{driver[0]}: {advice} ({unseen_gpu.WHERE})"
    for name in ["triton", *(["cuda"] if driver == H200 else [])]:
        with pytest.raises(DeviceError, match=r"cannot run here: torch .* does not see the NVIDIA"):
            choose(name)


@pytest.mark.parametrize(("version", "arch"), [(90402, "gfx942"), (90010, "gfx90a")])
def test_an_amd_gpu_that_torch_does_not_see_is_said(machine, monkeypatch, tmp_path, version, arch):
    machine(build="13.0")  # the usual torch
    for node, found in enumerate((0, version)):  # the first is a CPU
        place = tmp_path / "nodes" / str(node)
        place.mkdir(parents=True)
        (place / "properties").write_text(f"simd_count 4\ngfx_target_version {found}\n")
    advice = f"it is built without ROCm: install torch's ROCm build ({unseen_gpu.WHERE})"
    with pytest.raises(DeviceError) as told:
        choose("auto")
    assert str(told.value) == REFUSED.format(torch.__version__, f"AMD GPU {arch}", advice)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "")
    assert choose("auto").name == "reference"


def test_a_gpu_whose_driver_does_not_answer_is_said(machine, tmp_path):
    machine(build="13.0")
    (tmp_path / "nvidia0").touch()
    with pytest.raises(DeviceError, match="nor does the driver's libcuda: ask nvidia-smi what is"):
        choose("auto")


@pytest.mark.parametrize("hidden", ["", "-1", None])
@pytest.mark.parametrize("driver", [("Tesla T4", "sm_75"), H200, None])
def test_a_gpu_that_is_hidden_or_that_no_backend_takes_is_no_error(machine, monkeypatch, tmp_path, driver, hidden):
    machine(driver=driver)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        (tmp_path / "nvidia0").touch()
    elif driver == H200:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # and torch sees it
        assert unseen_gpu.unseen_gpu() is None
        return
    assert choose("auto").name == "reference"


@pytest.mark.parametrize(
    ("device", "name"),
    [("", "cuda"), ("cpu", "reference"), ("nvidia", "cuda"), ("h200", "cuda"), ("amd", "triton"), ("mi300x", "triton")],
)
def test_auto_serves_the_kind_of_device_that_is_asked_for(machine, device, name):
    machine("NVIDIA H200")
    assert choose("auto", device).name == name


@pytest.mark.parametrize("device", ["h2000", "H200", "cuda"])
def test_a_device_that_nobody_knows_is_said_to_be_unknown(machine, device):
    machine("NVIDIA H200")
    with pytest.raises(DeviceError, match=f"no device '{device}': have cpu, nvidia, amd, h200"):
        choose("auto", device)


def test_what_a_backend_lacks_is_said_to_who_names_it(machine):
    machine("NVIDIA A100-SXM4-80GB")
    with pytest.raises(DeviceError, match=r"backend cuda cannot run here: .*A100.*; choose --backend triton"):
        choose("cuda")
    seen = look_at("cuda")
    assert not seen.available and not seen.lacks_software


def test_auto_takes_the_first_that_can_run_and_says_why(monkeypatch, plugins):
    monkeypatch.syspath_prepend(str(plugins))
    assert ranked() == ["cuda", "triton", "reference"]  # and no third party's, which is taken by name
    choice = choose("auto")
    for name in ranked()[: ranked().index(choice.name)]:
        seen = look_at(name)
        assert not seen.available and f"{name}: {seen.reason}" in choice.reason
    assert choose("fake").backend.name == "fake"


def test_a_backend_that_nobody_offers_is_refused_by_name(monkeypatch):
    with pytest.raises(RequestError, match="no backend named 'rocm': have auto, cuda, hip"):
        choose("rocm")
    monkeypatch.setattr("kog_triton.backends.choose.backend_names", list)
    with pytest.raises(DeviceError, match="no backend can run here"):
        choose("auto")


def test_a_backend_that_cannot_be_imported_is_reported(monkeypatch, tmp_path):
    info = install(tmp_path) / "kog_fake-1.0.dist-info"
    (info / "entry_points.txt").write_text("[kog_triton.backends]\nlost = no_such_module:Backend\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = look_at("lost")
    assert not seen.available and "no_such_module" in seen.reason
