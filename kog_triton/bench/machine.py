"""Where a run took place: GPU, driver, versions, commit; and its clocks before and after.

What cannot be found is null, never guessed. `source` is a digest of the package's Python, C++, CUDA and HIP
files, so that a run names its code also where there is no git; `changed` are those of them that are not as
the commit has them, so that a record of an exact commit says so whatever else lies in the folder.

Clocks and counters are asked of nvidia-smi, which comes with the driver, and not of NVML by nvidia-ml-py (13.615), one
dependency more: what holds a GPU back is a field there whose unit neither the package nor its names tell, and whose
number is not the same in all releases (slowdown by heat: 251, now 269). nvidia-smi names microseconds, and kept records
were read with it on an H200. Nobody asks while something is timed, so that a process costs nothing.
"""

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import kog_triton
from kog_triton.backends.device import gpu_of
from kog_triton.doctor import driver, installed_version, system
from kog_triton.schedule.topology import Gpu

PACKAGES = ("torch", "triton", "transformers", "numpy", "cupy-cuda13x")
SOURCES = (".py", ".cu", ".h", ".hip")
QUERY = {  # field of a sample -> nvidia-smi's name
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
    "reasons": "clocks_event_reasons.active",
}
# Bits of nvidia-smi's clock event reasons (NVML nvmlClocksEventReason*) that mean a slower GPU.
SLOWDOWNS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
# The same by the driver's clock: microseconds that each has held the GPU back since the driver was loaded. Older
# drivers have no such fields.
COUNTERS = {
    "power cap": "clocks_event_reasons_counters.sw_power_cap",
    "software thermal slowdown": "clocks_event_reasons_counters.sw_thermal_slowdown",
    "hardware thermal slowdown": "clocks_event_reasons_counters.hw_thermal_slowdown",
    "hardware power brake": "clocks_event_reasons_counters.hw_power_brake_slowdown",
}
CLOCK_DROP = 0.97  # of the SM clock: less than this at the end is a drop
TIMEOUT_S = 20


def describe() -> dict[str, Any]:
    """The `machine` part of a record."""
    root = Path(kog_triton.__file__).parents[1]
    in_git = (root / ".git").exists()  # an installed package may lie in somebody else's repository
    changed = changed_files(root) if in_git else None
    has_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
        "num_gpus": torch.cuda.device_count() if has_gpu else 0,
        "cpu": _cpu(),
        "platform": system(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "kog_triton": kog_triton.__version__,
        "packages": {name: installed_version(name) for name in PACKAGES},
        "commit": _say(["git", "-C", str(root), "rev-parse", "HEAD"]) if in_git else None,
        "dirty": None if changed is None else bool(changed),
        "changed": changed,
        "source": source_digest(),
    }


def gpu_row() -> Gpu | None:
    """The GPU that torch sees; None without one."""
    return gpu_of(torch.device("cuda")) if torch.cuda.is_available() else None


def source_files() -> dict[str, Path]:
    """Every file of Python, C++, CUDA and HIP by its name in the installed package.

    In a checkout the CUDA and HIP backends lie beside the package; installed, inside it.
    """
    root = Path(kog_triton.__file__).parent
    places = {"": root}
    for name in ("cuda", "hip"):
        found = find_spec(f"kog_triton.backends.{name}")
        if found and found.origin:
            places[f"backends/{name}/"] = Path(found.origin).parent
    return {
        name + file.relative_to(place).as_posix(): file
        for name, place in places.items()
        for file in place.rglob("*")
        if file.suffix in SOURCES
    }


def source_digest() -> str:
    """SHA-256 of their names and contents."""
    digest = hashlib.sha256()
    for name, file in sorted(source_files().items()):
        digest.update(f"{name}\0".encode())
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


def changed_files(root: Path) -> list[str] | None:
    """Names, as `source_files` gives them, whose contents are not those of the commit; None if git cannot say.

    By content alone: times, modes and files that are no source do not count.
    """
    said = _say(["git", "-C", str(root), "ls-tree", "-r", "-z", "HEAD", "kog_triton", "backends"])
    if said is None:
        return None
    kept = {}
    for entry in said.split("\0"):
        facts, _, name = entry.partition("\t")
        if Path(name).suffix in SOURCES:
            kept[name.removeprefix("kog_triton/")] = facts.split()[2]
    ours = {name: _blob(file.read_bytes()) for name, file in source_files().items()}
    return sorted(n for n in kept.keys() | ours.keys() if kept.get(n) != ours.get(n))


def _blob(content: bytes) -> str:
    """What git names such a file's content."""
    head = f"blob {len(content)}\0".encode()
    return hashlib.sha1(head + content, usedforsecurity=False).hexdigest()


def sample() -> dict[str, Any] | None:
    """Clocks, temperature, power and clock event reasons now; None without nvidia-smi or a GPU."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    found, slowed = parse(_ask(QUERY), QUERY), parse(_ask(COUNTERS), COUNTERS)
    known = slowed is not None and None not in slowed.values()
    return None if found is None else {**found, "slowed_us": slowed if known else None}


def _ask(fields: dict[str, str]) -> str | None:
    # the driver counts all GPUs of the machine, torch those that CUDA_VISIBLE_DEVICES leaves
    which = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = ["nvidia-smi", "-i", which, f"--query-gpu={','.join(fields.values())}"]
    return _say([*query, "--format=csv,noheader,nounits"])


def parse(said: str | None, names: Collection[str]) -> dict[str, float | None] | None:
    """The first line of nvidia-smi's CSV; a field that it does not support is null."""
    cells = [cell.strip() for line in (said or "").splitlines()[:1] for cell in line.split(",")]
    if len(cells) != len(names):
        return None
    return {name: _number(cell) for name, cell in zip(names, cells, strict=True)}


def conditions(samples: list[dict[str, Any] | None]) -> dict[str, Any]:
    """The `conditions` part of a record, of what `sample` gave."""
    known = [sample for sample in samples if sample]
    return {"samples": known, "throttled": throttling(known)}


def throttling(samples: list[dict[str, Any]]) -> list[str] | None:
    """Why the GPU was slower than it can be; None if nothing is known.

    Samples tell their own moments, and the counters of the first and the last what lay in between.
    """
    if not samples:
        return None
    found = []
    for bit, why in SLOWDOWNS.items():
        if any(int(s["reasons"] or 0) & bit for s in samples):
            found.append(why)
    before, after = samples[0].get("slowed_us"), samples[-1].get("slowed_us")
    if before and after:
        for why in COUNTERS:
            if after[why] > before[why]:
                found.append(f"{why} for {(after[why] - before[why]) / 1e3:.1f} ms")
    first, last = samples[0]["sm_mhz"], samples[-1]["sm_mhz"]
    if first and last and last < CLOCK_DROP * first:
        found.append(f"SM clock fell from {first:.0f} to {last:.0f} MHz")
    return found


def _number(cell: str) -> float | None:
    try:
        return float(int(cell, 16)) if cell.startswith("0x") else float(cell)
    except ValueError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} CPUs"


def _say(argv: list[str]) -> str | None:
    """What a program prints; None if it is not there or fails."""
    if shutil.which(argv[0]) is None:
        return None
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
