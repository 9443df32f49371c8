"""The compiler for AMD GPUs of this machine, and what it is told (a Toolchain of cuda/jit.py).

clang++ of ROCm or the newest of the PATH; else ROCm's hipcc, which calls a clang++ of its own; else hipRTC, the
library. Our headers stand for ROCm's: what hipcc and hipRTC put before every text is not used.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from kog_triton.backends.cuda import toolchain as cuda
from kog_triton.backends.cuda.compile_child import find_hiprtc
from kog_triton.errors import DeviceError

FOLDER = Path(__file__).resolve().parent
# HIP's first: a header of the same name takes the place of CUDA's (docs/HIP.md).
INCLUDES = (FOLDER / "include", cuda.INCLUDE)
PROGRAM: tuple[str, ...] = (
    *("-x", "hip", "--offload-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"),
)
FLAGS: tuple[str, ...] = ("-std=c++20", "-O3", "-Wno-everything")
MI300 = "gfx942"  # what the kernel is written for
LEAST_CLANG = 18  # ROCm's since 6.2
NAMES = ("clang++", "hipcc", "hipRTC")


class Clang(NamedTuple):
    """A clang++ that is there.

    said     its version, in its words
    why_not  it cannot be taken; "" if it can
    """

    place: str
    said: str
    version: int
    why_not: str


def clangs() -> list[Clang]:
    """ROCm's, whose runtime knows what it makes, then those of all folders on the PATH, the newest first."""
    of_rocm = [_rocm(f"{folder}/clang++") for folder in ("llvm/bin", "lib/llvm/bin")]
    on_path = [
        str(path)
        for folder in os.get_exec_path()
        for path in sorted(Path(folder).glob("clang++*"))
        if re.fullmatch(r"clang\+\+(-\d+)?", path.name)
    ]
    newest = sorted(_there(on_path), key=lambda clang: -clang.version)
    each = [*_there([*of_rocm, "amdclang++"]), *newest]
    once: dict[tuple[str, str], Clang] = {}  # one has several names
    for clang in each:
        once.setdefault((os.path.realpath(clang.place), clang.said), clang)
    return [*once.values()]


def _there(places: Iterable[str]) -> list[Clang]:
    found = filter(None, map(shutil.which, places))
    return [_look_at(place, os.stat(place).st_mtime_ns) for place in found]


def _look_at(place: str, changed: int) -> Clang:
    of_lld, said = _say(place, changed, "-v", "-print-prog-name=lld")
    found = re.search(r"version (\d+)", said)
    version = int(found[1]) if found else 0
    why_not = ""
    if not found:
        why_not = f"clang++ at {place} does not say its version"
    elif version < LEAST_CLANG:
        why_not = f"clang++ {version} at {place} is older than {LEAST_CLANG}"
    elif not shutil.which(of_lld):
        why_not = f"clang++ {version} at {place} finds no lld"
    return Clang(place, said, version, why_not)


def compilers() -> dict[str, str]:
    """What each of NAMES says of itself, and where it is, in the order in which they are taken; "" for one that is not
    here, or of no use."""
    usable = [clang for clang in clangs() if not clang.why_not]
    hipcc, version = _hipcc()
    return {
        "clang++": _at(usable[0].said, usable[0].place) if usable else "",
        "hipcc": _at(version, hipcc) if version else "",
        "hipRTC": _version_of_library(),
    }


def _hipcc() -> tuple[str, str]:
    """Where it is, and its version; "" for what there is not."""
    place = shutil.which(_rocm("bin/hipcc")) or shutil.which("hipcc") or ""
    return place, _say(place, os.stat(place).st_mtime_ns, "--version")[0] if place else ""


def _at(said: str, place: str) -> str:
    """The first " of " is this one: compile_child.py takes the place from behind it."""
    return f"{said.replace(' of ', ' ')} of {place}"


def compilers_in_words() -> str:
    """For `kog doctor`."""
    why_not = _why_not()
    return ", ".join(f"{name}: {said or why_not.get(name) or 'not found'}" for name, said in compilers().items())


def compiler_name() -> str:
    """What would compile here, with its version and where it is; DeviceError if there is none."""
    for name, version in compilers().items():
        if version:
            return f"{name}: {version}"
    reasons = ", ".join(filter(None, _why_not().values()))
    why_not = f" ({reasons})" if reasons else ""
    raise DeviceError(
        f"no compiler for AMD GPUs, none of {', '.join(NAMES)}{why_not}: install ROCm, set ROCM_PATH to where it lies, "
        f"or put a clang++ of {LEAST_CLANG} or newer, with lld, on the PATH"
    )


def _why_not() -> dict[str, str]:
    """Of what is there and cannot be taken, by NAMES."""
    hipcc, version = _hipcc()
    return {
        "clang++": ", ".join(clang.why_not for clang in clangs() if clang.why_not),
        "hipcc": f"hipcc at {hipcc} does not say its version" if hipcc and not version else "",
    }


def _rocm(place: str) -> str:
    return os.path.join(os.environ.get("ROCM_PATH") or "/opt/rocm", place)


@functools.cache
def _say(program: str, changed: int, *arguments: str) -> tuple[str, str]:
    """The first line of stdout and of stderr; nothing of a program that fails, or hangs. Asked once, as long as it does
    not change."""
    try:
        said = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=cuda.SAY_S)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    first, second = (text.strip().partition("\n")[0] for text in (said.stdout, said.stderr))
    return first, second


def _version_of_library() -> str:
    of_torch = str(Path(torch.__file__).parent / "lib/libhiprtc.so") if torch.version.hip else ""
    library, place = find_hiprtc(of_torch)
    if library is None:
        return ""
    major, minor = ctypes.c_int(), ctypes.c_int()
    if library.hiprtcVersion(ctypes.byref(major), ctypes.byref(minor)):
        return ""
    return _at(f"{major.value}.{minor.value}", place)


def flags_for(arch: str) -> tuple[str, ...]:
    """For what `compiler_name` says."""
    program = () if compiler_name().startswith("hipRTC") else PROGRAM
    return (*program, *FLAGS, f"--offload-arch={arch}", *(f"-I{folder}" for folder in INCLUDES))


def headers() -> list[Path]:
    """All that a source may include."""
    return [path for folder in INCLUDES for path in sorted(folder.rglob("*.h"))]
