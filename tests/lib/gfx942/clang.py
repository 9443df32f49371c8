"""HIP C++ compiled by clang-19 for gfx942, and C++ for this machine: no ROCm, no header but our own. What LLVM 19
disassembles."""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.lib.compiled import made_once, version_of
from tests.lib.gfx942.code_object import CodeObject

HIP = Path(__file__).parent / "hip"
CLANG, OBJDUMP, OPT = "clang++-19", "llvm-objdump-19", "opt-19"
BOTH = ("-std=c++20", "-ffp-contract=off", "-Wno-everything", f"-I{HIP}")
DEVICE = (
    *("-x", "hip", "--offload-arch=gfx942", "--offload-device-only", "--no-gpu-bundle-output"),
    *("-nogpuinc", "-nogpulib", "-O3"),
)
HOST = ("-x", "c++", "-O1", "-march=native", "-fPIC", "-shared")


def _need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not there: apt-get install clang-19 lld-19 llvm-19")


def _compile(source: str, flags: Sequence[str]) -> Path:
    _need(CLANG)
    flags = (*flags, *BOTH)

    def make(draft: Path) -> None:
        command = [CLANG, *flags, str(HIP / source), "-o", str(draft)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]

    sources = [path.read_bytes() for path in sorted(HIP.iterdir())]
    return made_once([version_of(CLANG), " ".join([source, *flags]).encode(), *sources], make)


def text_object(source: str, includes: Sequence[Path], *flags: str) -> CodeObject:
    """Of a kernel's text, whose headers lie in `includes`, the first of a name foremost."""
    return CodeObject(_compile_text(source, includes, flags).read_bytes())


def text_ir(source: str, includes: Sequence[Path], *flags: str) -> str:
    """As `llvm_ir`, of a kernel's text, and with pointers into the memory that they are known to point into, as LLVM 19
    finds out when it generates code, and newer LLVM before: of what is left it loads three arguments at once by an
    instruction that gfx942 does not have."""
    _need(OPT)
    made = _compile_text(source, includes, ("-emit-llvm", "-S", *flags))
    command = [OPT, "-S", "-passes=infer-address-spaces", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return _for_newer(done.stdout)


def _compile_text(source: str, includes: Sequence[Path], flags: Sequence[str]) -> Path:
    _need(CLANG)
    how = (*DEVICE, "-std=c++20", "-Wno-everything", *flags)

    def make(draft: Path) -> None:
        command = [CLANG, *how, *(f"-I{folder}" for folder in includes), "-", "-o", str(draft)]
        done = subprocess.run(command, input=source.encode(), capture_output=True)
        assert done.returncode == 0, done.stderr.decode()[:4000]

    headers = [path.read_bytes() for folder in includes for path in sorted(folder.rglob("*.h"))]
    parts = [version_of(CLANG), " ".join(how).encode(), source.encode(), *headers]
    return made_once(parts, make)


def link(objects: Path, to: Path) -> None:
    """An object file of another code generator to a code object, by lld-19."""
    how = ("--target=amdgcn-amd-amdhsa", "-mcpu=gfx942", "-nogpulib")
    done = subprocess.run([CLANG, *how, str(objects), "-o", str(to)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


def code_object(source: str, *flags: str) -> CodeObject:
    """Of a file in hip/, for gfx942."""
    return CodeObject(_compile(source, (*DEVICE, *flags)).read_bytes())


def shared_object(source: str) -> Path:
    """Of a file in hip/, for this machine."""
    return _compile(source, HOST)


def disassembly(code_object: CodeObject, kernel: str) -> str:
    """Of a kernel of any compiler's, as LLVM prints it."""
    _need(OBJDUMP)
    with tempfile.NamedTemporaryFile() as file:
        file.write(code_object.blob)
        file.flush()
        command = [OBJDUMP, "-d", "--mcpu=gfx942", f"--disassemble-symbols={kernel}", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def llvm_ir(source: str, *flags: str) -> str:
    """Of a file in hip/, for gfx942, optimized but not yet generated; without what newer LLVM refuses."""
    return _for_newer(_compile(source, (*DEVICE, "-emit-llvm", "-S", *flags)).read_text())


def _for_newer(ir: str) -> str:
    # By its new name: else half of a wave's registers would be accumulation registers, with moves to and from them.
    ir = ir.replace('"amdgpu-no-agpr"', '"amdgpu-agpr-alloc"="0"')
    return re.sub(r"(call .*), !noundef ![0-9]+", r"\1", ir)
