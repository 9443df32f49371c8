"""A GPU that the machine has and torch does not see: then "auto" takes no CPU in its place without a word."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from kog_triton.backends.nvidia_driver import read_gpu
from kog_triton.errors import DeviceError

NVIDIA_DEVICE = Path("/dev/nvidia0")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")  # a folder each, CPUs too
HIDING = {  # vendor -> environment variables by which a user keeps its GPUs from programs
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
WHERE = "https://pytorch.org/get-started/locally/"


@dataclass(frozen=True)
class UnseenGpu:
    """`arch` as compilers name it, "" if only the device's file is there; `reason` and `advice` as of Availability."""

    name: str
    vendor: str
    arch: str
    reason: str
    advice: str


def unseen_gpu() -> UnseenGpu | None:
    """None where torch sees a GPU, and where there is none or the user has hidden it."""
    if torch.cuda.is_available():
        return None
    if not _hidden("nvidia") and (found := _nvidia()):
        return _told(*found)
    if not _hidden("amd") and (arch := _amd_arch()):
        return _told(f"AMD GPU {arch}", "amd", arch)
    return None


def _told(name: str, vendor: str, arch: str) -> UnseenGpu:
    build = "CUDA" if vendor == "nvidia" else "ROCm"
    has = torch.version.cuda if vendor == "nvidia" else torch.version.hip
    reason = f"torch {torch.__version__} does not see the {name} of this machine"
    if not has:
        advice = f"it is built without {build}: install torch's {build} build ({WHERE})"
    elif not arch:
        advice = "nor does the driver's libcuda: ask nvidia-smi what is wrong"
    else:
        advice = f"it is built for {build} {has}: install a driver for that, or another build of torch ({WHERE})"
    return UnseenGpu(name, vendor, arch, reason, advice)


def _hidden(vendor: str) -> bool:
    """Whether the environment asks for no GPU at all."""
    said = (os.environ.get(variable) for variable in HIDING[vendor])
    return any(value is not None and (not value.strip() or value[0] == "-") for value in said)


def _nvidia() -> tuple[str, str, str] | None:
    try:
        seen = read_gpu()
    except DeviceError:
        return ("NVIDIA GPU", "nvidia", "") if NVIDIA_DEVICE.exists() else None
    return seen.name, "nvidia", seen.arch


def _amd_arch() -> str:
    """Of the first GPU that the kernel driver lists: gfx_target_version 90402 is gfx942, 90010 gfx90a."""
    for file in sorted(AMD_NODES.glob("*/properties")):
        try:
            lines = dict(line.split(" ", 1) for line in file.read_text().splitlines())
            version = int(lines["gfx_target_version"])
        except (OSError, KeyError, ValueError):
            continue
        if version:
            return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return ""
