"""What `kog doctor` tells of HIP: each thing that the backend needs, what it found, or what is to be done."""

from collections.abc import Callable
from pathlib import Path

from kog_triton.backends.hip.backend import HipBackend
from kog_triton.backends.hip.driver import count_gpus, find_library
from kog_triton.backends.hip.selftest import xcds_in_words
from kog_triton.backends.hip.toolchain import compiler_name
from kog_triton.errors import DeviceError

KFD = Path("/dev/kfd")  # of the amdgpu driver


def look() -> dict[str, str] | None:
    """By what is needed; None on a machine without anything of AMD's. Runs the self-test where the backend can run."""
    library = find_library()
    if library is None and not KFD.exists():
        return None
    return {
        "driver": f"{KFD} is there" if KFD.exists() else f"no {KFD}: install the amdgpu driver",
        "runtime": f"{library}, {_gpus()}" if library else _gpus(),
        "compiler": _said(compiler_name),
        "backend": _said(_ready),
        "self-test": _said(_self_test),
    }


def _said(what: Callable[[], str]) -> str:
    """A function's words, or those of its DeviceError."""
    try:
        return what()
    except DeviceError as error:
        return str(error)


def _gpus() -> str:
    return _said(lambda: f"{count_gpus()} GPUs")


def _ready() -> str:
    seen = HipBackend.availability()
    if not seen.ok:
        raise DeviceError(f"{seen.reason}; {seen.advice}")
    return f"ready, by name alone: {seen.by_name_only}"


def _self_test() -> str:
    if not HipBackend.availability().ok:
        return "not run"
    return f"passed; {xcds_in_words(HipBackend.xcds())}"
