"""What `kog doctor` tells of HIP: each thing that the backend needs, what it found, or what is to be done."""

from collections.abc import Callable
from pathlib import Path

from kog_triton.backends import Availability
from kog_triton.backends.cuda.layout.collectives import MOST_RANKS
from kog_triton.backends.hip.driver import count_gpus, find_library
from kog_triton.backends.hip.objects import source_of_code
from kog_triton.backends.hip.peers import check_peers
from kog_triton.backends.hip.selftest import xcds_in_words
from kog_triton.backends.hip.toolchain import compilers_in_words
from kog_triton.errors import DeviceError

KFD = Path("/dev/kfd")  # of the amdgpu driver
UNTRIED = "one GPU's words, rows and host were tried; other GPUs, stages and requests will be as a model is opened"


def look(seen: Availability, xcds: Callable[[], list[int]]) -> dict[str, str]:
    """By what is needed; nothing on a machine without anything of AMD's. Asks for the XCDs of blocks, which runs the
    self-test, where the backend can run."""
    library = find_library()
    if library is None and not KFD.exists():
        return {}
    gpus = _said(_gpus)
    without = ", and HIP does without" if seen.ok else ": install the amdgpu driver"
    return {
        "driver": f"{KFD} is there" if KFD.exists() else f"no {KFD}{without}",
        "runtime": f"{library}, {gpus}" if library else gpus,
        "peers": _said(_peers),
        "compiler": _said(source_of_code),
        "compilers": compilers_in_words(),
        "backend": f"ready, by name alone: {seen.by_name_only}" if seen.ok else f"{seen.reason}; {seen.advice}",
        "self-test": _said(lambda: f"passed; {xcds_in_words(xcds())}; {UNTRIED}") if seen.ok else "not run",
    }


def _said(what: Callable[[], str]) -> str:
    """A function's words, or those of its DeviceError."""
    try:
        return what()
    except DeviceError as error:
        return str(error)


def _gpus() -> str:
    count = count_gpus()
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _peers() -> str:
    """Whether `--gpus` can be as many as there are."""
    count = min(count_gpus(), MOST_RANKS)
    if count == 1:
        return "none: one GPU"
    check_peers(count)
    return f"the first {count} GPUs reach each other"
