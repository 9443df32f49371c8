"""The compiler for AMD GPUs of this machine, and what it is told (a Toolchain of cuda/jit.py).

clang++ of ROCm or of a distribution; else ROCm's hipcc, which calls a clang++ of its own; else hipRTC, the library.
Our headers stand for ROCm's: what hipcc and hipRTC put before every text is not used.
"""

import ctypes
import subprocess
from pathlib import Path

import torch

from kog_triton.backends.cuda import toolchain as cuda
from kog_triton.backends.cuda.compile_child import find_clang, find_hipcc, find_hiprtc
from kog_triton.errors import DeviceError

FOLDER = Path(__file__).resolve().parent
# HIP's first: a header of the same name takes the place of CUDA's (docs/HIP.md).
INCLUDES = (FOLDER / "include", cuda.INCLUDE)
PROGRAM: tuple[str, ...] = (
    *("-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"),
)
FLAGS: tuple[str, ...] = ("-std=c++20", "-O3", "-Wno-everything")
MI300 = "gfx942"  # what the kernel is written for
NAMES = ("clang++", "hipcc", "hipRTC")


def compilers() -> dict[str, str]:
    """What each of NAMES says of itself, in the order in which they are taken; "" for one that is not here."""
    programs = {"clang++": find_clang(), "hipcc": find_hipcc()}
    said = {name: _version(path) if path else "" for name, path in programs.items()}
    return said | {"hipRTC": _version_of_library()}


def compiler_name() -> str:
    """What would compile here, with its version; DeviceError if there is none."""
    for name, version in compilers().items():
        if version:
            return f"{name}: {version}"
    raise DeviceError(
        f"no compiler for AMD GPUs, none of {', '.join(NAMES)}: install ROCm, set ROCM_PATH to where it lies, or put a "
        "clang++ of 18 or newer, with lld, on the PATH"
    )


def _version(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True)
    return said.stdout.strip().partition("\n")[0] if said.returncode == 0 else ""


def _version_of_library() -> str:
    of_torch = str(Path(torch.__file__).parent / "lib/libhiprtc.so") if torch.version.hip else ""
    library, place = find_hiprtc(of_torch)
    if library is None:
        return ""
    major, minor = ctypes.c_int(), ctypes.c_int()
    if library.hiprtcVersion(ctypes.byref(major), ctypes.byref(minor)):
        return ""
    return f"{major.value}.{minor.value} of {place}"


def flags_for(arch: str) -> tuple[str, ...]:
    """For what `compiler_name` says."""
    program = () if compiler_name().startswith("hipRTC") else PROGRAM
    return (*program, *FLAGS, f"--offload-arch={arch}", *(f"-I{folder}" for folder in INCLUDES))


def headers() -> list[Path]:
    """All that a source may include."""
    return [path for folder in INCLUDES for path in sorted(folder.rglob("*.h"))]
