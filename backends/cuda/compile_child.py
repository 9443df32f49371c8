"""The process that compiles kernels, each in a fork of its own: a job as a line of JSON and the source come by a
socket, a byte that says how it ended and the cubin, or the compiler's words, go back.

NVRTC compiles one program of a process at a time, so that kernels compile side by side in processes of their own alone.
They are forks, since to start a process and load NVRTC costs 0.2 to 0.35 s, and a first start compiles 22 kernels
(benchmarks/cuda-log.md#early). The first process is run as a file and imports nothing of the package: a start waits for
it, and to import the package, with numpy, costs it 0.2 s, and more than a second where Python has kept no bytecode. It
ends with the process that began it, however that ends, and its forks with it. What a compiler says on its way goes to
stderr.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

COMPILED, REFUSED = b"+", b"-"  # what comes first: behind it a cubin, or why the compiler refuses
PR_SET_PDEATHSIG = 1  # prctl(2)


class Refused(Exception):
    """In the compiler's words."""


def find_nvrtc() -> Any:
    """NVIDIA's compiler as a library, from where cupy takes it (cuda.pathfinder, which comes with it); None where
    either is not there. OSError for a library that does not load."""
    try:
        # cupy's own functions for it import all of cupy, which takes as long as a kernel of prompts compiles
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:
        return None
    try:
        place = load_nvidia_dynamic_lib("nvrtc").abs_path
    except DynamicLibNotFoundError:
        return None
    except RuntimeError as error:
        raise OSError(str(error)) from error
    return load_nvrtc(place)


def load_nvrtc(place: str) -> Any:
    """NVRTC of this file; OSError if it does not load."""
    library = ctypes.CDLL(place)
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    # NVRTC asks for its built-in functions' library by name alone, when it first compiles.
    beside = Path(place).resolve().parent
    with suppress(OSError):  # where it lies elsewhere NVRTC finds it, or says that it does not
        version = nvrtc_name(library).removeprefix("nvrtc ")
        ctypes.CDLL(str(beside / f"libnvrtc-builtins.so.{version}"), ctypes.RTLD_GLOBAL)
    return library


def nvrtc_name(library: Any) -> str:
    """With its version: "nvrtc 13.0"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"nvrtc {major.value}.{minor.value}"


def find_hiprtc(first: str = "") -> tuple[Any, str]:
    """AMD's compiler as a library, from the file given or from ROCm, and where it was; None where there is none."""
    rocm = os.environ.get("ROCM_PATH") or "/opt/rocm"
    names = ("libhiprtc.so.7", "libhiprtc.so.6", "libhiprtc.so")
    places = [first] if first else []
    places += [*names, *(f"{rocm}/lib/{name}" for name in reversed(names))]
    for place in places:
        try:
            library = ctypes.CDLL(place)
        except OSError:
            continue
        library.hiprtcGetErrorString.restype = ctypes.c_char_p
        return library, place
    return None, ""


def translate(text: str, source: str, flags: Sequence[str], compiler: str) -> bytes:
    """A text's cubin, in this process, by a toolchain's `compiler_name`; Refused if it does not compile.

    What a library is told is what a program is, but for where the text and the code lie.
    """
    if compiler.startswith("nvrtc"):
        nvrtc = find_nvrtc()
        if nvrtc and (name := nvrtc_name(nvrtc)) != compiler:  # what is kept is kept by its name
            raise Refused(
                f"a compiler's process finds {name}, and the one that asks {compiler}: leave one of them installed"
            )
        return by_library(nvrtc, NVRTC, text, source, flags)
    if compiler.startswith("nvcc"):
        return _by_program(["nvcc", "-cubin"], text, source, flags)
    place = compiler.partition(" of ")[2]
    if compiler.startswith("hipRTC"):
        return by_library(find_hiprtc(place)[0], HIPRTC, text, source, flags)
    return _by_program([place], text, source, flags)


class Library(NamedTuple):
    """A vendor's compiler as a library: AMD has NVIDIA's functions under names of its own."""

    name: str
    prefix: str
    code: str  # machine code, by its functions' names


NVRTC, HIPRTC = Library("NVRTC", "nvrtc", "CUBIN"), Library("hipRTC", "hiprtc", "Code")


def by_library(library: Any, of: Library, text: str, source: str, flags: Sequence[str]) -> bytes:
    """A text's machine code, by a loaded library; Refused in its words, or if the library is None."""
    if library is None:
        raise Refused(f"lib{of.prefix}.so is not there any more")

    def ask(name: str, *arguments: Any) -> Any:
        return getattr(library, of.prefix + name)(*arguments)

    def call(name: str, *arguments: Any) -> None:
        if status := ask(name, *arguments):
            words = f"{of.prefix}{name}: {(ask('GetErrorString', status) or b'').decode()} ({status})"
            raise Refused(f"{of.name} refuses the kernel: {words}\n{log()}")

    def log() -> str:
        if not program or ask("GetProgramLogSize", program, ctypes.byref(size)):
            return ""
        said = ctypes.create_string_buffer(size.value)
        ask("GetProgramLog", program, said)
        return said.value.decode()

    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    names = text.encode(), source.encode()
    call("CreateProgram", ctypes.byref(program), *names, 0, None, None)
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        call("CompileProgram", program, len(flags), options)
        call(f"Get{of.code}Size", program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        call(f"Get{of.code}", program, code)
        return code.raw
    finally:
        ask("DestroyProgram", ctypes.byref(program))


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


def compile_job(job: bytes, text: bytes) -> bytes:
    """How it ended, and what with."""
    how = json.loads(job)
    try:
        return COMPILED + translate(text.decode(), how["source"], how["flags"], how["compiler"])
    except Refused as error:
        return REFUSED + str(error).encode()
    except Exception as error:  # such as a compiler that is not there any more
        return REFUSED + f"{how['source']}: {type(error).__name__}: {error}".encode()


def fork(server: int, fds: Sequence[int]) -> None:
    """Compile what comes by the first of `fds`, a socket, in a new process, whose stderr is the second."""
    if os.fork():
        for fd in fds:
            os.close(fd)
        return
    die_with_parent()
    if os.getppid() == server:  # which may have ended before it could be asked for
        os.dup2(fds[1], 2)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with socket.socket(fileno=fds[0]) as asked, asked.makefile("rb") as job:
            asked.sendall(compile_job(job.readline(), job.read()))
    os._exit(0)


def main() -> None:
    """Jobs come by the socket that is stdin, until nobody has its other end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks: their sockets tell
    with suppress(Exception):  # whoever is to compile by it hears why
        find_nvrtc()  # loads it, once for all
    with socket.socket(fileno=0) as jobs:
        while fds := socket.recv_fds(jobs, 1, 2)[1]:
            fork(os.getpid(), fds)


if __name__ == "__main__":
    main()
