"""The same HIP source, files of hip/ and the kernels of backends/hip, by four code generators for AMD: clang-19's own,
and clang-19's LLVM IR through three others.

    Triton's LLVM           of the Triton that is installed
    newest Triton's LLVM    of its newest release: its wheel has AMD's code generator as a library of its own
    AMD's LLVM              as AMD's rocm-bindings-compiler has it

The last two come out of wheels on PyPI, 335 MB, fetched once (tests/lib/wheel_files.py) and never imported:
`python -m tests.lib.gfx942.backends` fetches them now.
"""

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.lib.compiled import made_once, version_of
from tests.lib.gfx942 import clang, places
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.wheel_files import WheelFile

ARCH, TRIPLE = b"gfx942", b"amdgcn-amd-amdhsa"
# The libraries take no notice of Python: the wheels of one version of it serve all.
OPTIONS = ("--python-version=3.11", "--abi=cp311", "--platform=manylinux_2_28_x86_64")
NEWEST_TRITON = WheelFile(
    "triton==3.9.0",
    "triton-3.9.0-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
    "1622118a038b0c6e16fa4a0305da62c8b3c15904ee1cc4d4e65846a25969e41e",
    "triton/backends/amd/lib/libtriton_amd_codegen.so",
    "9269664ab7f062f1bbcebb231134cf7a6511e9367381c2508502303d8e8b120e",
    OPTIONS,
)
AMDS = WheelFile(
    "rocm-bindings-compiler==10.0.0.0.1.2",
    "rocm_bindings_compiler-10.0.0.0.1.2-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
    "f5cdc392fd65602a94ed2ae896280f39068769a47b122a5de00e5900a096a7a8",
    "rocm/bindings/llvm/libLLVM.so",
    "9a7e0ee2cc7cebe5f56f308ae1dbdec1e97d401a3368c235d98b5386b59ddab1",
    OPTIONS,
)
# AMD's library asks for two of ROCm's own, which no wheel has: for compressing sections, which nothing here does.
ROCMS = {
    "z": ("crc32", "compress2", "compressBound", "uncompress"),
    "zstd": (
        *("ZSTD_isError", "ZSTD_getErrorName", "ZSTD_createCCtx", "ZSTD_freeCCtx", "ZSTD_CCtx_setParameter"),
        *("ZSTD_compressBound", "ZSTD_compress2", "ZSTD_decompress"),
    ),
}  # fmt: skip
NOT_OPTIMIZED_AGAIN, POSITION_INDEPENDENT, OBJECT_FILE = (3, 2, 1)  # of LLVM-C: -O3, relocations, output


def by_triton(ir: str) -> CodeObject:
    """LLVM IR, generated, assembled and linked by the installed Triton's LLVM."""
    from triton._C.libtriton import amd, llvm

    def make(draft: Path) -> None:
        llvm.init_targets()
        arch = ARCH.decode()
        text = llvm.translate_to_asm(ir, amd.TARGET_TRIPLE, arch, "", [], False, False)
        with tempfile.NamedTemporaryFile() as assembled:
            Path(assembled.name).write_bytes(amd.assemble_amdgcn(text, arch, ""))
            amd.link_hsaco(assembled.name, str(draft))

    return CodeObject(made_once([version("triton").encode(), ir.encode()], make).read_bytes())


def _linked(generator: WheelFile, ir: str, generate: Callable[[bytes], bytes]) -> CodeObject:
    """What `generate` makes of the LLVM IR, an object file, as a code object."""

    def make(draft: Path) -> None:
        with tempfile.NamedTemporaryFile(suffix=".o") as generated:
            Path(generated.name).write_bytes(generate(ir.encode()))
            clang.link(Path(generated.name), draft)

    parts = [generator.file_sha256.encode(), version_of(clang.CLANG), ir.encode()]
    return CodeObject(made_once(parts, make).read_bytes())


# ---- the newest Triton's ----


class _Options(ctypes.Structure):
    """What triton_amdgpu_compile is asked, in its version 1."""

    _fields_ = [("version", ctypes.c_uint32)]
    _fields_ += [(n, ctypes.c_char_p) for n in ("triple", "processor", "features", "abi", "flags", "disabled")]
    _fields_ += [(n, ctypes.c_uint8) for n in ("fusion", "unoptimized", "canonicalize", "dump", "timing")]  # fmt: skip


@functools.cache
def newest_triton() -> ctypes.CDLL:
    return ctypes.CDLL(str(NEWEST_TRITON.path()))


def _asked(function: Callable[..., int], text: bytes, *how: object) -> bytes:
    out, size, error = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_void_p()
    given = (text, ctypes.c_size_t(len(text)), *how)
    if function(*given, ctypes.byref(out), ctypes.byref(size), ctypes.byref(error)):
        raise RuntimeError(ctypes.string_at(error).decode())
    return ctypes.string_at(out, size.value)


def _by_newest_triton(ir: bytes) -> bytes:
    library = newest_triton()
    options = _Options(1, TRIPLE, ARCH, b"", b"", b"", b"", 0, 0, 0, 0, 0)
    text = _asked(library.triton_amdgpu_compile, ir, ctypes.byref(options))
    return _asked(library.triton_amdgpu_assemble, text, TRIPLE, ARCH, b"")


def by_newest_triton(ir: str) -> CodeObject:
    return _linked(NEWEST_TRITON, ir, _by_newest_triton)


# ---- AMD's ----


@functools.cache
def amds() -> ctypes.CDLL:
    """AMD's LLVM, with what stands for ROCm's libraries: functions that end the process if they are called."""
    for name, functions in ROCMS.items():

        def make(draft: Path, name: str = name, functions: tuple[str, ...] = functions) -> None:
            with tempfile.TemporaryDirectory() as folder:
                source, versions = Path(folder, "stub.c"), Path(folder, "versions")
                stubs = "".join(f"void {one}(void) {{ __builtin_trap(); }}\n" for one in functions)
                source.write_text(stubs)
                versions.write_text("AMDROCM_SYSDEPS_1.0 { global: *; };")
                how = f"-Wl,--version-script={versions},-soname,librocm_sysdeps_{name}.so.1"
                command = [clang.CLANG, "-x", "c", "-fno-builtin", "-w", "-shared", "-fPIC", how]
                subprocess.run([*command, str(source), "-o", str(draft)], check=True)

        made = made_once([b"stub", name.encode(), *map(str.encode, functions)], make)
        ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(AMDS.path()))
    for part in ("TargetInfo", "Target", "TargetMC", "AsmPrinter", "AsmParser"):
        getattr(library, f"LLVMInitializeAMDGPU{part}")()
    for name in (
        *("ContextCreate", "CreateMemoryBufferWithMemoryRangeCopy", "CreateTargetMachine", "GetBufferStart"),
    ):  # fmt: skip
        getattr(library, f"LLVM{name}").restype = ctypes.c_void_p
    library.LLVMGetBufferSize.restype = ctypes.c_size_t
    return library


def _by_amds(ir: bytes) -> bytes:
    llvm, pointer = amds(), ctypes.c_void_p
    context, error = pointer(llvm.LLVMContextCreate()), ctypes.c_char_p()

    def done(failed: int) -> None:
        if failed:
            raise RuntimeError((error.value or b"").decode())

    size = ctypes.c_size_t(len(ir))
    text = pointer(llvm.LLVMCreateMemoryBufferWithMemoryRangeCopy(ir, size, b"litmus"))
    module, target, out = pointer(), pointer(), pointer()
    said = ctypes.byref(error)
    done(llvm.LLVMParseIRInContext(context, text, ctypes.byref(module), said))
    done(llvm.LLVMGetTargetFromTriple(TRIPLE, ctypes.byref(target), said))
    how = (NOT_OPTIMIZED_AGAIN, POSITION_INDEPENDENT, 0)
    machine = pointer(llvm.LLVMCreateTargetMachine(target, TRIPLE, ARCH, b"", *how))
    emit = llvm.LLVMTargetMachineEmitToMemoryBuffer
    done(emit(machine, module, OBJECT_FILE, said, ctypes.byref(out)))
    return ctypes.string_at(llvm.LLVMGetBufferStart(out), llvm.LLVMGetBufferSize(out))


def by_amds(ir: str) -> CodeObject:
    return _linked(AMDS, ir, _by_amds)


# What makes a code object of clang-19's LLVM IR, but for clang-19 itself.
INSTALLED = {"Triton's LLVM": by_triton}
FETCHED = {"newest Triton's LLVM": by_newest_triton, "AMD's LLVM": by_amds}
GENERATORS: dict[str, Callable[[str], CodeObject]] = INSTALLED | FETCHED
WHEELS = dict(zip(FETCHED, (NEWEST_TRITON, AMDS), strict=True))
CLANG = "clang-19"


def text_object(source: str, includes: Sequence[Path], compiler: str = CLANG) -> CodeObject:
    """Of a kernel's text, whose headers lie in `includes`; clang's says where in the source instructions are from."""
    if compiler == CLANG:
        return clang.text_object(source, includes, places.DEBUG)
    return GENERATORS[compiler](clang.text_ir(source, includes))


def _of_file(generate: Callable[[str], CodeObject]) -> Callable[..., CodeObject]:
    return lambda source, *flags: generate(clang.llvm_ir(source, *flags))


# Who makes a code object of a file of hip/.
COMPILERS = {CLANG: clang.code_object} | {n: _of_file(g) for n, g in GENERATORS.items()}
HERE = {name: made for name, made in COMPILERS.items() if name not in FETCHED}

if __name__ == "__main__":
    for wheel in WHEELS.values():
        print(wheel.path())
