"""NVRTC by its C interface, out of the wheel nvidia-cuda-nvrtc: for machine code where no nvcc is."""

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path


def load() -> ctypes.CDLL | None:
    """The library; None if the wheel is not installed."""
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or () if found else ():
        for path in Path(root).glob("cu13/lib/libnvrtc.so.*"):
            for other in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(other), ctypes.RTLD_GLOBAL)  # it looks for that by name
            return ctypes.CDLL(str(path))
    return None


def version(library: ctypes.CDLL) -> bytes:
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) == 0
    return b"nvrtc %d.%d" % (major.value, minor.value)


def compile_cubin(library: ctypes.CDLL, text: str, flags: Sequence[str]) -> bytes:
    """AssertionError with the compiler's words if it refuses."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    made = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"decode.cu", 0, None, None
    )
    assert made == 0
    try:
        options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        refused = library.nvrtcCompileProgram(program, len(flags), options)
        what = "ProgramLog" if refused else "CUBIN"
        assert getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        out = ctypes.create_string_buffer(size.value)
        assert getattr(library, f"nvrtcGet{what}")(program, out) == 0
        assert not refused, out.value.decode()
        return out.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
