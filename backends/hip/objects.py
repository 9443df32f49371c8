"""Code objects: compiled here and kept, or taken from a folder where another machine has put them.

    KOG_HIP_OBJECTS=folder kog generate --backend hip ..

The folder is the only source then: what it does not hold, or not whole, is refused in one line, which names the file
and how it is made. `python -m kog_triton.prebuild FOLDER` writes a model's files, where there is a compiler and no GPU:
each as kernels are kept (kernel_cache.py).
"""

import os
from pathlib import Path

from kog_triton.backends.cuda import kernel_cache
from kog_triton.backends.cuda.jit import compile_cubin, key_of
from kog_triton.backends.hip import toolchain
from kog_triton.errors import DeviceError

FOLDER = "KOG_HIP_OBJECTS"
SUFFIX = ".hsaco"
MAKE = (
    "make it with python -m kog_triton.prebuild of this version, model, context, --gpus and --blocks, or "
    f"take {FOLDER} away to compile here"
)


def source_of_code() -> str:
    """Where code objects come from, in words; DeviceError where there is neither a folder of them nor a compiler."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return toolchain.compiler_name()
    if not Path(folder).is_dir():
        raise DeviceError(f"no code objects: {FOLDER} is {folder}, which is no folder; set it to one, or take it away")
    return f"{len([*Path(folder).glob(f'*{SUFFIX}')])} code objects in {folder} ({FOLDER})"


def file_of(header: str, source: str, arch: str) -> str:
    """The name of a code object's file: of all that it depends on but the compiler."""
    key = key_of(header + (toolchain.FOLDER / source).read_text(), arch, "", toolchain)
    return f"{Path(source).stem}-{arch}-{key}{SUFFIX}"


def code_object(header: str, source: str, arch: str) -> bytes:
    """A source behind one generated header, for a GPU. DeviceError where it can be neither found nor compiled."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return compile_cubin(header, source, arch, tools=toolchain)
    path = Path(folder, file_of(header, source, arch))
    try:
        return kernel_cache.read(path)
    except OSError as error:
        raise DeviceError(f"{FOLDER} has no {path.name} ({error.strerror}): {MAKE}") from error
    except kernel_cache.Damaged as error:
        raise DeviceError(f"{error}: {MAKE}") from error
