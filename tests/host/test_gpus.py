"""What a GPU is: its driver's words, with what its row adds; drivers are faked, figures are the vendors'."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kog_triton.backends import device, nvidia_driver
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.model.shapes import named_shape
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS, KB, Seen, describe
from tests.lib.gpus import H200_SEEN, SEEN
from tests.lib.real_shapes import real_shape

# name, multiprocessors, blocks, TB/s, whether this project ran there
DESCRIBED = {
    "H200": ("h200", 132, 128, 4.8, True),
    "H100 SXM": ("h100", 132, 128, 3.35, False),
    "H100 PCIe": ("h100-pcie", 114, 114, 2.0, False),
    "H100 NVL": ("h100-nvl", 132, 128, 3.9, False),
    "H800": ("h800", 132, 128, 3.35, False),
    "H20": ("h20", 78, 78, 4.0, False),
    "GH200": ("gh200", 132, 128, 4.0, False),
    "B200": ("b200", 148, 148, 8.0, False),
    "RTX 5090": ("rtx-5090", 170, 170, 1.792, False),
    "RTX PRO 6000": ("rtx-pro-6000", 188, 188, 1.792, False),
    # No row has its multiprocessors: 2 x 14 GHz x 256 bits.
    "RTX 5090 Laptop": ("rtx-5090", 82, 82, 0.896, False),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", 128, 128, 1.008, False),
    "H200 slice": ("h200", 60, 60, 2.55, False),
    "A100 slice": ("a100", 14, 14, 0.255, False),
    "H200 share": ("h200", 33, 33, 1.2, False),
}
HOPPERS = ("H200", "H100 SXM", "H100 PCIe", "H100 NVL", "H800", "H20", "GH200", "H200 slice", "H200 share")


@pytest.mark.parametrize("which", SEEN)
def test_a_gpu_is_what_its_driver_says_and_its_row_adds(which):
    gpu, seen = describe(SEEN[which]), SEEN[which]
    found = (gpu.name, gpu.num_sms, gpu.num_blocks, gpu.bandwidth / 1e12, gpu.proven)
    assert found == (*DESCRIBED[which][:3], pytest.approx(DESCRIBED[which][3], 0.01), DESCRIBED[which][4])
    assert (gpu.arch, gpu.shared_bytes, gpu.memory_bytes) == (seen.arch, seen.shared_bytes, seen.memory_bytes)


def test_a_part_of_a_gpu_is_said():
    assert describe(SEEN["H200 slice"]).share == "a MIG slice of 60 of 132 multiprocessors"
    assert describe(SEEN["A100 slice"]).share == "a MIG slice of 14 of 108 multiprocessors"
    assert describe(SEEN["H200 share"]).share == "an MPS share of 33 of 132 multiprocessors"
    # The driver may say how many MPS leaves, or how many there are.
    assert describe(replace(SEEN["H200 share"], num_sms=34)).num_sms == 33
    unheard = replace(H200_SEEN, name="NVIDIA X MIG 1g.9gb", num_sms=8)
    assert describe(unheard).share == "a MIG slice of 8 multiprocessors"
    assert all(describe(SEEN[which]).share == "" for which in ("H200", "RTX 5090 Laptop", "RTX 4090"))


def test_where_nothing_says_how_fast_memory_is_a_block_is_as_fast_as_an_h200s():
    gpu = describe(Seen("NVIDIA X", "nvidia", "sm_90a", 50, 227 * KB, 10**10))
    assert gpu.block_rate == GPUS["h200"].block_rate == gpu.bandwidth / 50


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "llama-3.3-70b"])
@pytest.mark.parametrize("which", [*HOPPERS, "B200"])
def test_the_cuda_kernel_has_a_layout_on_every_hopper_and_parts_of_one(which, shape):
    """As much in flight as a block of that GPU reads in the time found best on an H200, if the ring holds it."""
    gpu = describe(SEEN[which])
    lowering = lower(build(real_shape(shape, 4)), gpu)
    check_lowering(lowering)
    layout = lay_out(lowering, 4096)
    assert lowering.num_blocks <= gpu.num_sms and layout.shared_bytes <= gpu.shared_bytes
    window, calm = layout.windows
    usual = (4.8e12 / 128, 64 * KB, 48 * KB)
    for slots, size in ((window, usual[1]), (calm, usual[2])):
        wanted = size * gpu.bandwidth / gpu.num_blocks / usual[0]
        enough = slots * lowering.ring_slot_bytes >= wanted > (slots - 1) * lowering.ring_slot_bytes
        assert enough or (slots >= layout.ring_slots // 2 and slots * lowering.ring_slot_bytes < wanted)
    assert 1 <= calm <= window <= layout.ring_slots // 2


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-8b", "laneformer-2b"])
def test_99_kb_of_shared_memory_hold_the_kernel_of_models_up_to_8b(shape):
    gpu = describe(SEEN["RTX 5090"])
    layout = lay_out(lower(build(named_shape(shape)), gpu), 4096)
    assert layout.shared_bytes <= 99 * KB and layout.ring_slots >= 2 * layout.windows[0]


# ---- drivers ----


class Driver:
    """libcuda.so.1 with one GPU, or none: what each attribute's number is answered with."""

    def __init__(self, gpus=1, attributes=None):
        self.gpus = gpus
        self.attributes = {16: 132, 36: 3_201_000, 37: 6144, 38: 60 << 20, 75: 9, 76: 0, 97: 232_448}
        self.attributes |= attributes or {}

    def __call__(self, name):
        assert name == "libcuda.so.1"
        return self

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, index):
        return 0 if index < self.gpus else 101

    def cuDeviceGetName(self, name, size, device):
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = 150_109_880_320
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        if self.attributes[attribute] is None:
            return 1
        value._obj.value = self.attributes[attribute]
        return 0


@pytest.fixture(autouse=True)
def no_share(monkeypatch):
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)


def test_the_driver_is_asked_for_each_figure(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", Driver())
    assert nvidia_driver.read_gpu() == H200_SEEN
    monkeypatch.setattr(torch.version, "hip", None)
    assert device.gpu_of(torch.device("cuda", 0)) == describe(H200_SEEN)
    assert device.gpu_of(torch.device("cpu")) is None
    # What a driver no longer tells is the row's.
    monkeypatch.setattr(ctypes, "CDLL", Driver(attributes={36: None, 37: None, 38: None}))
    assert describe(nvidia_driver.read_gpu()) == describe(H200_SEEN)


@pytest.mark.parametrize(("asked", "percent"), [("25", 25), ("12.5", 12.5), ("100", 100), ("0", 100), ("x", 100)])
def test_an_mps_share_comes_from_the_environment(monkeypatch, asked, percent):
    monkeypatch.setattr(ctypes, "CDLL", Driver())
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", asked)
    assert nvidia_driver.read_gpu().percent == percent


def test_without_such_a_gpu_the_driver_gives_none(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", Driver(gpus=1))
    with pytest.raises(nvidia_driver.DeviceError, match="the CUDA driver gives no GPU"):
        nvidia_driver.read_gpu(1)


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a"), ((8, 9), "sm_89")]
)
def test_code_of_a_capability_is_named_as_compilers_do(capability, arch):
    assert nvidia_driver.arch_of(*capability) == arch


@pytest.mark.parametrize(
    ("which", "cus", "blocks", "dies", "rate"),
    [
        ("MI300X", 304, 256, 8, 5.3e12),
        ("MI300X", 152, 152, 4, 2.65e12),
        ("MI300X VF", 76, 76, 2, 1.325e12),
        ("MI300X", 38, 38, 1, 0.6625e12),
        ("MI325X", 304, 256, 8, 6e12),
        ("MI300A", 228, 228, 6, 5.3e12),
    ],
)
def test_an_amd_gpu_is_described_by_torch(monkeypatch, which, cus, blocks, dies, rate):
    properties = SimpleNamespace(
        name=f"AMD Instinct {which}", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=cus,
        shared_memory_per_block=64 * KB, total_memory=206_000_000_000, L2_cache_size=4 << 20,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    gpu = device.gpu_of(torch.device("cuda", 0))
    assert (gpu.name, gpu.arch, gpu.vendor) == (which[:6].lower(), "gfx942", "amd")
    assert (gpu.num_blocks, gpu.dies, gpu.bandwidth) == (blocks, dies, pytest.approx(rate))
    assert gpu.share == ("" if cus > 200 else f"a partition of {cus} of 304 multiprocessors")
