"""Source text to a cubin: compiled once by NVRTC (cupy) or nvcc, kept by content (kernel_cache.py).

The key is a hash of the text, of every header it may include, of the flags and of the compiler. A cubin that was begun
before is waited for. The log `kog_triton.compilers` tells when a compiler starts and how long it took.
"""

import hashlib
import logging
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kog_triton.backends.cuda import kernel_cache
from kog_triton.errors import DeviceError

log = logging.getLogger("kog_triton.compilers")
FOLDER = Path(__file__).resolve().parent
INCLUDE = FOLDER / "include"
FLAGS = ("-std=c++20", "-lineinfo")
# What kernels are compiled for. "auto" takes them on Hopper alone, since they have run nowhere else.
HOPPER = "sm_90a"
ARCHS = (HOPPER, "sm_100a", "sm_120a")
_begun: dict[
    str, Future[bytes]
] = {}  # by key, until somebody asks for what they will have compiled


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


def begin_cubin(header: str, source: str = "decode.cu", arch: str = HOPPER) -> None:
    """Compile in a thread what `compile_cubin` will be asked for, unless it is kept; DeviceError if there is
    no compiler. What that says goes to who asks. Called by the main thread; no process ends before it is done."""
    text, compiler, key = _named(header, source, arch)
    begun = _begun.get(key)
    # In this order: one that ends in between has left its cubin.
    if (begun is not None and not begun.done()) or kernel_cache.load(key) is not None:
        return
    thread = ThreadPoolExecutor(1, "kog-compiler")
    _begun[key] = thread.submit(_compile, text, source, arch, compiler, key)
    thread.shutdown(wait=False)  # it still does this, and Python waits for it as it ends


def compile_cubin(
    header: str, source: str = "decode.cu", arch: str = HOPPER, compiler: str = ""
) -> bytes:
    """A source of this folder behind one generated header; DeviceError with the compiler's words
    if it refuses."""
    text, compiler, key = _named(header, source, arch, compiler)
    begun = _begun.get(key)
    if begun is not None:
        try:
            return begun.result()
        finally:
            if begun.done():  # it is not where Ctrl-C ended the wait
                _begun.pop(key, None)
    kept = kernel_cache.load(key)
    return _compile(text, source, arch, compiler, key) if kept is None else kept


def _named(header: str, source: str, arch: str, compiler: str = "") -> tuple[str, str, str]:
    """The text, its compiler, and the key under which what that makes of it is kept."""
    compiler = compiler or compiler_name()
    text = header + (FOLDER / source).read_text()
    return text, compiler, _key(text, arch, compiler)


def _compile(text: str, source: str, arch: str, compiler: str, key: str) -> bytes:
    begun = time.perf_counter()
    log.info("compiling %s by %s, once for this model", source, compiler)
    cubin = (_by_nvrtc if compiler.startswith("nvrtc") else _by_nvcc)(text, source, arch)
    log.info("compiled %s in %.1f s", source, time.perf_counter() - begun)
    kernel_cache.keep(key, cubin)
    return cubin


def flags_for(arch: str) -> tuple[str, ...]:
    return (*FLAGS, f"--gpu-architecture={arch}", f"-I{INCLUDE}")


def _key(text: str, arch: str, compiler: str) -> str:
    digest = hashlib.sha256("\0".join([text, compiler, arch, *FLAGS]).encode())
    for path in sorted(INCLUDE.rglob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _nvrtc() -> Any:
    """cupy's NVRTC, or None where cupy is not installed."""
    try:
        from cupy.cuda import nvrtc
    except ImportError:
        return None
    return nvrtc


def _by_nvrtc(text: str, source: str, arch: str) -> bytes:
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, flags_for(arch))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise DeviceError(f"NVRTC refuses the kernel: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def _by_nvcc(text: str, source: str, arch: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, cubin = Path(folder, source), Path(folder, "cubin")
        path.write_text(text)
        command = ["nvcc", "-cubin", *flags_for(arch), str(path), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise DeviceError(f"nvcc refuses the kernel:\n{done.stdout}{done.stderr}")
        return cubin.read_bytes()
