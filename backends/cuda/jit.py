"""Source text to machine code: compiled once, by the tools of a vendor, kept by content (kernel_cache.py).

Machine code is called a cubin here; AMD calls its own a code object. The key is a hash of the text, of every header it
may include, of the flags and of the compiler. A cubin that was begun before is waited for. The log
`kog_triton.compilers` tells when a compiler starts, how long it took and how many are still to come.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from kog_triton.backends.cuda import kernel_cache, toolchain
from kog_triton.backends.cuda.compilers import PROCESSES, compile_apart
from kog_triton.backends.cuda_archs import HOPPER

log = logging.getLogger("kog_triton.compilers")
_lock = threading.Lock()
_begun: dict[str, Future[bytes]] = {}  # by key, until somebody asks for it


class Toolchain(Protocol):
    """A vendor's compilers: a module with the sources' folder, and flags for every GPU.

    compiler_name  what would compile here, with its version; DeviceError if there is none
    flags_for      all flags of code for a GPU
    headers        all that a source may include
    """

    FOLDER: Path
    FLAGS: tuple[str, ...]

    def compiler_name(self) -> str: ...

    def flags_for(self, arch: str) -> tuple[str, ...]: ...

    def headers(self) -> Sequence[Path]: ...


CUDA: Any = toolchain  # a module is a Toolchain


def begin_cubin(header: str, source: str = "decode.cu", arch: str = HOPPER) -> None:
    """Begin to compile what `compile_cubin` will be asked for, in a process of its own, unless it is kept; DeviceError
    if there is no compiler. What that says goes to who asks."""
    _begin(*_named(header, source, arch))


def is_kept(header: str, source: str, arch: str = HOPPER) -> bool:
    """Whether nothing would be compiled; DeviceError if there is no compiler."""
    return kernel_cache.load(_named(header, source, arch)[-1]) is not None


def compile_cubin(
    header: str, source: str = "decode.cu", arch: str = HOPPER, compiler: str = "", tools: Toolchain = CUDA
) -> bytes:
    """A source of the tools' folder behind one generated header; DeviceError with the compiler's words
    if it refuses."""
    named = _named(header, source, arch, compiler, tools)
    future = _begin(*named)
    if future is None:
        kept = kernel_cache.load(named[-1])
        if kept is not None:
            return kept
        future = _begin(*named)  # damaged, or removed between the two
        assert future is not None
    try:
        return future.result()
    finally:
        if future.done():  # it is not where Ctrl-C ended the wait
            _begun.pop(named[-1], None)


def _begin(text: str, source: str, flags: Sequence[str], compiler: str, key: str) -> Future[bytes] | None:
    """The cubin on its way; None if it is kept."""
    with _lock:
        begun = _begun.get(key)
        if begun is not None and not (begun.done() and begun.exception()):
            return begun
        if kernel_cache.load(key) is not None:
            return None
        _begun[key] = PROCESSES.submit(_compile, text, source, flags, compiler, key)
        return _begun[key]


def _named(
    header: str, source: str, arch: str, compiler: str = "", tools: Toolchain = CUDA
) -> tuple[str, str, Sequence[str], str, str]:
    """The text, its source, flags and compiler, and the key under which what that makes of it is kept."""
    compiler = compiler or tools.compiler_name()
    text = header + (tools.FOLDER / source).read_text()
    key = key_of(text, arch, compiler, tools)
    return text, source, tools.flags_for(arch), compiler, key


def _compile(text: str, source: str, flags: Sequence[str], compiler: str, key: str) -> bytes:
    begun = time.perf_counter()
    log.info("compiling %s by %s, once for this model", source, compiler)
    cubin = compile_apart(text, source, flags, compiler)
    left = sum(not future.done() for future in [*_begun.values()]) - 1
    more = f", {left} more to come" if left > 0 else ""
    log.info("compiled %s in %.1f s%s", source, time.perf_counter() - begun, more)
    kernel_cache.keep(key, cubin)
    return cubin


def key_of(text: str, arch: str, compiler: str, tools: Toolchain) -> str:
    """Of all that machine code depends on; whichever compiler makes it if none is named."""
    digest = hashlib.sha256("\0".join([text, compiler, arch, *tools.FLAGS]).encode())
    for path in tools.headers():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
