"""The CUDA compiler of this machine, NVRTC (cupy) or nvcc, and what it is told."""

import shutil
import subprocess
from pathlib import Path

from kog_triton.backends.cuda.compile_child import find_nvrtc, nvrtc_name
from kog_triton.errors import DeviceError, first_line

FOLDER = Path(__file__).resolve().parent
INCLUDE = FOLDER / "include"
FLAGS = ("-std=c++20", "-lineinfo")
SAY_S = 30.0  # for a compiler to say its version, from a slow disk too


def compiler_name() -> str:
    """What would compile here, with its version; DeviceError if there is neither NVRTC nor nvcc."""
    try:
        nvrtc = find_nvrtc()
    except OSError as error:
        raise DeviceError(f"NVRTC does not load: {first_line(error)}: install cupy-cuda13x again") from error
    if nvrtc:
        return nvrtc_name(nvrtc)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise DeviceError("no CUDA compiler: pip install cupy-cuda13x, or put nvcc on the PATH")
    try:
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=SAY_S)
    except OSError as error:
        raise DeviceError(f"{nvcc} does not run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"{nvcc} --version does not end within {SAY_S:g} s") from error
    if done.returncode:
        said = done.stderr or done.stdout or f"status {done.returncode}"
        raise DeviceError(f"{nvcc} --version fails: {first_line(said)}")
    return "nvcc " + done.stdout.strip().rpartition("\n")[2]


def flags_for(arch: str) -> tuple[str, ...]:
    """Of code for one of cuda_archs.ARCHS."""
    return (*FLAGS, f"--gpu-architecture={arch}", f"-I{INCLUDE}")


def headers() -> list[Path]:
    """All that a source may include."""
    return sorted(INCLUDE.rglob("*.h"))
