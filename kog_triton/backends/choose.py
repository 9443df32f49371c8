"""Which backends can run on this machine, and which one "auto" means.

A backend is what an installed package offers under the entry point group `kog_triton.backends`. Its class says which
devices it serves, how fast it is beside the others, and what is missing where it cannot run (backends.Backend).
"""

from dataclasses import dataclass

from kog_triton.backends import Availability, Backend, backend_names, find_backend, refuse_narrow, why_not_narrow
from kog_triton.errors import DeviceError, RequestError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.topology import GPUS, check_device, find_gpu


@dataclass(frozen=True)
class Candidate:
    """One backend as seen from here."""

    name: str
    available: bool
    reason: str  # why it cannot run; empty if it can
    advice: str  # what to do about it
    by_name_only: str = ""  # why "auto" does not take it here; empty if it may
    lacks_software: bool = False  # its device is here


@dataclass(frozen=True)
class Choice:
    """The backend to use and why, in words for the user."""

    backend: type[Backend]
    name: str
    reason: str


def look_at(name: str) -> Candidate:
    """Whether one backend can run here. A broken package is a reason, not an exception."""
    try:
        seen = find_backend(name).availability()
    except Exception as error:
        reason = f"cannot be imported: {type(error).__name__}: {error}"
        seen = Availability(False, reason, f"reinstall the package that offers {name}")
    return Candidate(name, seen.ok, seen.reason, seen.advice, seen.by_name_only, seen.lacks_software)


def survey() -> list[Candidate]:
    return [look_at(name) for name in backend_names()]


def choose(name: str, device: str = "", spec: ModelSpec | None = None) -> Choice:
    """The backend behind a name or "auto"; for `spec`, if the model is known by now.

    "auto" takes the one of the lowest rank that serves the kind of device, can run here and runs the model's weights;
    but none for a CPU where a GPU is here that only lacks software. A name that is not known raises RequestError; one
    that cannot run here, DeviceError with its reason and what to do.
    """
    if name == "auto":
        return _fastest(device, spec)
    if name not in backend_names():
        raise RequestError(f"no backend named {name!r}: have auto, {', '.join(backend_names())}")
    seen = look_at(name)
    if not seen.available:
        advice = f"; {seen.advice}" if seen.advice else ""
        raise DeviceError(f"backend {name} cannot run here: {seen.reason}{advice}")
    backend = find_backend(name)
    if spec is not None:
        refuse_narrow(backend, spec)
    return Choice(backend, name, "asked for")


def ranked() -> list[str]:
    """The backends that "auto" may take, fastest first: those whose classes have a rank."""
    found = []
    for name in backend_names():
        try:
            rank = getattr(find_backend(name), "rank", None)
        except Exception:  # a broken package, which `look_at` reports to who asks for it
            continue
        if rank is not None:
            found.append((rank, name))
    return [name for _, name in sorted(found)]


def serves(backend: type[Backend], device: str) -> bool:
    """Whether a backend may be for such a device at all; "" is any."""
    vendor = find_gpu(device).vendor if device in GPUS else device
    return vendor == "" or vendor in backend.vendors


def _fastest(device: str, spec: ModelSpec | None) -> Choice:
    check_device(device)
    passed_over: list[str] = []
    lacking = ""
    for name in ranked():
        backend = find_backend(name)
        if not serves(backend, device):
            passed_over.append(f"{name}: not for device {device}")
            continue
        seen = look_at(name)
        reason = seen.by_name_only if seen.available else seen.reason
        if seen.lacks_software:
            lacking = lacking or f"{seen.reason}: {seen.advice}"
        if not reason and spec is not None:
            reason = why_not_narrow(backend, spec)
        if reason:
            passed_over.append(f"{name}: {reason}")
            continue
        if lacking and "cpu" in backend.vendors:
            raise DeviceError(
                f"the GPU of this machine is not used: {lacking}; or choose --backend {name}, which is slow"
            )
        return Choice(backend, name, "; ".join(passed_over) or "the fastest")
    raise DeviceError(f"no backend can run here ({'; '.join(passed_over)}): see `kog doctor` for what to install")
