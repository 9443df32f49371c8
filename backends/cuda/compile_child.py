"""The process that compiles one kernel: the job as a line of JSON and the source on stdin, the cubin on stdout.

NVRTC compiles one program of a process at a time, so that kernels compile side by side in processes of their own alone.
This one is run as a file and imports nothing of the package: a start waits for it, and to import the package, with
numpy, costs it 0.2 s, and more than a second where Python has kept no bytecode. It ends with the process that began it,
however that ends. What the compiler says of an error goes to stderr.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REFUSED = 3  # exit code: the compiler refuses, and stderr says why
PR_SET_PDEATHSIG = 1  # prctl(2)


class Refused(Exception):
    """In the compiler's words."""


def find_nvrtc() -> Any:
    """cupy's NVRTC, or None where cupy is not installed."""
    try:
        # cupy.cuda has the name too, behind all of cupy and scipy: 0.4 to 1 s of every start
        from cupy_backends.cuda.libs import nvrtc
    except ImportError:
        return None
    return nvrtc


def find_clang() -> str | None:
    """The clang++ that compiles for AMD GPUs: ROCm's, or else the newest on the PATH; None where there is none."""
    rocm = os.environ.get("ROCM_PATH") or "/opt/rocm"
    places = [*(f"{rocm}/{place}/clang++" for place in ("llvm/bin", "lib/llvm/bin")), "amdclang++"]
    places += ["clang++", *(f"clang++-{version}" for version in range(23, 17, -1))]
    return next(filter(None, map(shutil.which, places)), None)


def translate(text: str, source: str, flags: Sequence[str], compiler: str) -> bytes:
    """A text's cubin, in this process, by a toolchain's `compiler_name`; Refused if it does not compile."""
    if compiler.startswith("nvrtc"):
        return _by_nvrtc(text, source, flags)
    if compiler.startswith("nvcc"):
        return _by_program(["nvcc", "-cubin"], text, source, flags)
    return _by_program([find_clang() or "clang++"], text, source, flags)


def _by_nvrtc(text: str, source: str, flags: Sequence[str]) -> bytes:
    nvrtc = find_nvrtc()
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, tuple(flags))
        cubin: bytes = nvrtc.getCUBIN(program)
        return cubin
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise Refused(f"NVRTC refuses the kernel: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def _by_program(program: Sequence[str], text: str, source: str, flags: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, cubin = Path(folder, source), Path(folder, "cubin")
        path.write_text(text)
        command = [*program, *flags, str(path), "-o", str(cubin)]
        # Its own children, which write into that folder alone, may take seconds more.
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent)
        if done.returncode:
            name = os.path.basename(program[0])
            raise Refused(f"{name} refuses the kernel:\n{done.stdout}{done.stderr}")
        return cubin.read_bytes()


def die_with_parent() -> None:
    """Called by a new process: Linux kills it when the thread that began it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    die_with_parent()
    job = json.loads(sys.stdin.buffer.readline())
    if os.getppid() != job["parent"]:  # which ended before it could be asked for
        return REFUSED
    text = sys.stdin.buffer.read().decode()
    try:
        cubin = translate(text, job["source"], job["flags"], job["compiler"])
    except Refused as error:
        print(error, file=sys.stderr)
        return REFUSED
    sys.stdout.buffer.write(cubin)
    return 0


if __name__ == "__main__":
    sys.exit(main())
