"""The compiler for AMD GPUs of this machine, clang++, and what it is told (a Toolchain of cuda/jit.py).

clang alone, of ROCm or of a distribution: our headers stand for ROCm's, which hipcc and hipRTC put before every text.
"""

import subprocess
from pathlib import Path

from kog_triton.backends.cuda import toolchain as cuda
from kog_triton.backends.cuda.compile_child import find_clang
from kog_triton.errors import DeviceError

FOLDER = Path(__file__).resolve().parent
# HIP's first: a header of the same name takes the place of CUDA's (docs/HIP.md).
INCLUDES = (FOLDER / "include", cuda.INCLUDE)
FLAGS: tuple[str, ...] = (
    *("-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"),
    *("-std=c++20", "-O3", "-Wno-everything"),
)
MI300 = "gfx942"  # what the kernel is written for


def compiler_name() -> str:
    """What would compile here, with its version; DeviceError if there is no clang++."""
    clang = find_clang()
    if clang is None:
        raise DeviceError(
            "no compiler for AMD GPUs: install ROCm, set ROCM_PATH to where it lies, or put a clang++ of 18 or newer, "
            "with lld, on the PATH"
        )
    said = subprocess.run([clang, "--version"], capture_output=True, text=True, check=True).stdout
    return f"clang++: {said.partition(chr(10))[0].strip()}"


def flags_for(arch: str) -> tuple[str, ...]:
    return (*FLAGS, f"--offload-arch={arch}", *(f"-I{folder}" for folder in INCLUDES))


def headers() -> list[Path]:
    """All that a source may include."""
    return [path for folder in INCLUDES for path in sorted(folder.rglob("*.h"))]
