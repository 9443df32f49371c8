"""The same HIP source by other code generators for AMD: clang-19's LLVM IR through the one that Triton brings."""

import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.lib.compiled import made_once
from tests.lib.gfx942 import clang
from tests.lib.gfx942.code_object import CodeObject

ARCH = "gfx942"


def by_triton(source: str, *flags: str) -> CodeObject:
    """A file of hip/, generated, assembled and linked by the installed Triton's LLVM."""
    from triton._C.libtriton import amd, llvm

    ir = clang.llvm_ir(source, *flags)

    def make(draft: Path) -> None:
        llvm.init_targets()
        text = llvm.translate_to_asm(ir, amd.TARGET_TRIPLE, ARCH, "", [], False, False)
        with tempfile.NamedTemporaryFile() as assembled:
            Path(assembled.name).write_bytes(amd.assemble_amdgcn(text, ARCH, ""))
            amd.link_hsaco(assembled.name, str(draft))

    return CodeObject(made_once([version("triton").encode(), ir.encode()], make).read_bytes())


# Who makes a code object of a file of hip/.
COMPILERS = {"clang-19": clang.code_object, "Triton's LLVM": by_triton}
