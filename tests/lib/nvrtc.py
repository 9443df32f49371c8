"""NVRTC out of the wheel nvidia-cuda-nvrtc: for machine code where no nvcc is."""

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest

from kog_triton.backends.cuda import compile_child


def place() -> str:
    """The library's file; empty if the wheel is not installed."""
    found = importlib.util.find_spec("nvidia")
    roots = found.submodule_search_locations or () if found else ()
    files = (path for root in roots for path in Path(root).glob("cu13/lib/libnvrtc.so.*"))
    return str(next(files, ""))


def load() -> ctypes.CDLL | None:
    """None if the wheel is not installed."""
    return compile_child.load_nvrtc(place()) if place() else None


def needed() -> ctypes.CDLL:
    """The library; without the wheel, which the extra `test` brings on Linux on x86-64, the test is skipped."""
    library = load()
    if library is None:
        pytest.skip("the wheel nvidia-cuda-nvrtc is not there")
    return library


def version(library: ctypes.CDLL) -> bytes:
    return compile_child.nvrtc_name(library).encode()


def compile_cubin(library: ctypes.CDLL, text: str, flags: Sequence[str]) -> bytes:
    """Refused with the compiler's words."""
    return compile_child.by_library(library, compile_child.NVRTC, text, "decode.cu", flags)
