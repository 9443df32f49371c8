"""The CUDA compiler of this machine: NVRTC (cupy) or nvcc, and what one of them makes of a text in this process."""

import ctypes
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kog_triton.errors import DeviceError

FOLDER = Path(__file__).resolve().parent
INCLUDE = FOLDER / "include"
FLAGS = ("-std=c++20", "-lineinfo")
# What kernels are compiled for. "auto" takes them on Hopper alone, since they have run nowhere else.
HOPPER = "sm_90a"
ARCHS = (HOPPER, "sm_100a", "sm_120a")
PR_SET_PDEATHSIG = 1  # prctl(2)


def compiler_name() -> str:
    """What would compile here, with its version; DeviceError if there is neither NVRTC nor nvcc."""
    if nvrtc := _nvrtc():
        return "nvrtc {}.{}".format(*nvrtc.getVersion())
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise DeviceError("no CUDA compiler: pip install cupy-cuda13x, or put nvcc on the PATH")
    return (
        "nvcc "
        + subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
        .stdout.strip()
        .rpartition("\n")[2]
    )


def translate(text: str, source: str, flags: Sequence[str], compiler: str) -> bytes:
    """A text's cubin, in this process; `flags` as of flags_for. DeviceError with the compiler's words if it refuses."""
    return (_by_nvrtc if compiler.startswith("nvrtc") else _by_nvcc)(text, source, flags)


def flags_for(arch: str) -> tuple[str, ...]:
    """Of code for one of ARCHS."""
    return (*FLAGS, f"--gpu-architecture={arch}", f"-I{INCLUDE}")


def die_with_parent() -> None:
    """Called by a new process: Linux kills it when the thread that began it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _nvrtc() -> Any:
    """cupy's NVRTC, or None where cupy is not installed."""
    try:
        # cupy.cuda has the name too, behind all of cupy and scipy: 0.4 to 1 s of every start
        from cupy_backends.cuda.libs import nvrtc
    except ImportError:
        return None
    return nvrtc


def _by_nvrtc(text: str, source: str, flags: Sequence[str]) -> bytes:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, tuple(flags))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise DeviceError(f"NVRTC refuses the kernel: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def _by_nvcc(text: str, source: str, flags: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, cubin = Path(folder, source), Path(folder, "cubin")
        path.write_text(text)
        command = ["nvcc", "-cubin", *flags, str(path), "-o", str(cubin)]
        # Its own children, which write into that folder alone, may take seconds more.
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent)
        if done.returncode:
            raise DeviceError(f"nvcc refuses the kernel:\n{done.stdout}{done.stderr}")
        return cubin.read_bytes()
