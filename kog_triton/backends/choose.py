"""Which backends can run on this machine, and which one "auto" means.

A backend is what an installed package offers under the entry point group `kog_triton.backends`; the
four known ones are listed even if they are not installed, with how to install them.
"""

from dataclasses import dataclass

from kog_triton.backends import (
    Backend,
    backend_names,
    find_backend,
    refuse_narrow,
    why_not_narrow,
)
from kog_triton.errors import DeviceError, RequestError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.topology import GPUS, find_gpu

KNOWN = ("cuda", "triton", "hip", "reference")
# What "auto" tries, best first. Triton has to be asked for by name: it does not yet sample with all that a
# request may ask, and a default that refuses default settings would be none.
AUTO_ORDER = ("cuda", "hip", "reference")
OTHER_DEVICES = {  # what a backend does not serve
    "cuda": ("cpu", "amd"),
    "triton": ("cpu",),
    "hip": ("cpu", "nvidia"),
}
INSTALL = {
    "cuda": 'pip install "kog-triton[cuda]"',
    "triton": 'pip install "kog-triton[cuda]" (NVIDIA) or "kog-triton[rocm]" (AMD)',
    "hip": "it is not part of this version",
    "reference": "pip install kog-triton again: its entry points are missing",
}


@dataclass(frozen=True)
class Candidate:
    """One backend as seen from here."""

    name: str
    installed: bool
    available: bool
    reason: str  # why it cannot run; empty if it can
    advice: str  # what to do about it


@dataclass(frozen=True)
class Choice:
    """The backend to use and why, in words for the user."""

    backend: type[Backend]
    name: str
    reason: str


def known_names() -> list[str]:
    """Every name a user may ask for: the known backends, then the others."""
    return [*KNOWN, *(name for name in backend_names() if name not in KNOWN)]


def look_at(name: str) -> Candidate:
    """Whether one backend can run here. A broken package is a reason, not an exception."""
    if name not in backend_names():
        return Candidate(name, False, False, "not installed", INSTALL.get(name, ""))
    try:
        seen = find_backend(name).availability()
    except Exception as error:
        reason = f"cannot be imported: {type(error).__name__}: {error}"
        return Candidate(name, True, False, reason, f"reinstall the package that offers {name}")
    return Candidate(name, True, seen.ok, seen.reason, seen.advice)


def survey() -> list[Candidate]:
    return [look_at(name) for name in known_names()]


def choose(name: str, device: str = "", spec: ModelSpec | None = None) -> Choice:
    """The backend behind a name or "auto"; for `spec`, if the model is known by now.

    "auto" takes the first of AUTO_ORDER that serves the kind of device, can run here and runs the model's weights. A
    name that is not known raises RequestError; one that cannot run here, DeviceError with its reason and what to do.
    """
    if name == "auto":
        return _first_available(device, spec)
    if name not in known_names():
        raise RequestError(f"no backend named {name!r}: have auto, {', '.join(known_names())}")
    seen = look_at(name)
    if not seen.available:
        advice = f"; {seen.advice}" if seen.advice else ""
        raise DeviceError(f"backend {name} cannot run here: {seen.reason}{advice}")
    backend = find_backend(name)
    if spec is not None:
        refuse_narrow(backend, spec)
    return Choice(backend, name, "asked for")


def serves(name: str, device: str) -> bool:
    """Whether a backend may be for such a device at all; "" is any."""
    vendor = find_gpu(device).vendor if device in GPUS else device
    return vendor not in OTHER_DEVICES.get(name, ())


def _first_available(device: str, spec: ModelSpec | None) -> Choice:
    passed_over: list[str] = []
    for name in AUTO_ORDER:
        if not serves(name, device):
            passed_over.append(f"{name}: not for device {device}")
            continue
        seen = look_at(name)
        if seen.available:
            backend = find_backend(name)
            narrow = why_not_narrow(backend, spec) if spec is not None else ""
            if not narrow:
                return Choice(backend, name, "; ".join(passed_over) or "the fastest")
            passed_over.append(f"{name}: {narrow}")
            continue
        passed_over.append(f"{name}: {seen.reason}")
    raise DeviceError(
        f"no backend can run here ({'; '.join(passed_over)}): see `kog doctor` for what to install"
    )
