"""`kog doctor`: what can run on this machine, what is missing, and what to install.

Looks and reports; it loads no model and exits with 0 whatever it finds. `--json` prints the same as
one JSON document.
"""

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kog_triton import __version__
from kog_triton.backends import backend_names, find_backend
from kog_triton.backends.choose import survey
from kog_triton.cli.arguments import Parser
from kog_triton.cli.caches import Cache, caches
from kog_triton.cli.command import end_process, run
from kog_triton.cli.model import add_checkpoint, check_revision
from kog_triton.demo import checkpoint_path
from kog_triton.errors import printable

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "cupy-cuda13x")
# what some features need: package -> the feature
OPTIONAL = {
    "llguidance": "--json-schema, --regex, --choice, --grammar",
    "gguf": "K-quants and 5-bit types of GGUF files",
    "transformers": "the peers of kog bench",
    "matplotlib": "pictures of kog profile",
}
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


def examine(model: str | None = None, revision: str | None = None) -> dict[str, Any]:
    """Everything that `kog doctor` shows, ready for JSON; with a model, whether its weights fit."""
    demo = checkpoint_path()
    found = {
        "kog_triton": __version__,
        "python": platform.python_version(),
        "platform": system(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "driver": driver(),
        "gpus": gpus(),
        "unseen_gpu": unseen(),
        "findings": findings(),
        "backends": [asdict(candidate) for candidate in survey()],
        "demo": {"path": str(demo), "present": (demo / "config.json").is_file()},
        "optional": {name: {"version": installed_version(name), "for": what} for name, what in OPTIONAL.items()},
        "memory": memory(),
        "caches": [cache_found(cache) for cache in caches()],
    }
    return found if model is None else found | {"model": fits(model, found, revision)}


def memory() -> dict[str, int | None]:
    """Bytes of main memory, all and free, as Linux tells; None elsewhere."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return {
            name: int(lines[field].split()[0]) * 1024
            for name, field in (("total_bytes", "MemTotal"), ("available_bytes", "MemAvailable"))
        }
    except (OSError, KeyError, ValueError):
        return {"total_bytes": None, "available_bytes": None}


def size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def cache_found(cache: Cache) -> dict[str, Any]:
    """Where a cache is, how much it holds, and whether the next run can write there."""
    place = cache.path
    while place is not None and not place.exists():
        place = place.parent
    return {
        "name": cache.name,
        "path": None if cache.path is None else str(cache.path),
        "bytes": sum(size for _, size in cache.files()),
        "writable": place is not None and os.access(place, os.W_OK),
    }


def fits(model: str, found: dict[str, Any], revision: str | None = None) -> dict[str, Any]:
    """What each backend would do with a model: why it would not run it, or the bytes beside the memory it would use.

    Only headers are read. Keys and values are those of one slot over the whole context.
    """
    from kog_triton.checkpoint.folder import Checkpoint

    spec = Checkpoint.open(model, revision).spec
    gpu = max((g["memory_bytes"] for g in found["gpus"]), default=None)
    cache = spec.kv_bytes_per_position * spec.max_context
    rows = []
    for backend in found["backends"]:
        on_cpu = backend["name"] == "reference"
        wide = 4 if on_cpu else spec.dtype.bytes
        needed = spec.num_parameters * wide + cache
        have = found["memory"]["available_bytes"] if on_cpu else gpu
        if not backend["available"]:
            says = f"would not run it: {backend['reason']}"
        elif have is not None and needed > have:
            says = f"would run out of memory: {size(needed)} of {size(have)}: see --max-model-len"
        else:
            of = "" if have is None else f" of {size(have)}"
            says = f"would take {size(needed)}{of}"
        rows.append({"name": backend["name"], "bytes": needed, "says": says})
    return {"path": model, "family": spec.family, "num_parameters": spec.num_parameters, "backends": rows}


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver() -> str | None:
    """The version that the GPU's kernel driver gives itself, None without one."""
    for file in DRIVERS:
        if file.is_file():
            line = file.read_text().splitlines()[0].strip()
            found = re.search(r"\d+(\.\d+)+", line)
            return found.group() if found else line
    return None


def system() -> str:
    """Such as "Linux 6.18 x86_64, glibc 2.39": what decides which programs run, and no more."""
    release = ".".join(platform.release().split(".")[:2])
    libc = " ".join(platform.libc_ver()).strip()
    return f"{platform.system()} {release} {platform.machine()}" + (f", {libc}" if libc else "")


def gpus() -> list[dict[str, Any]]:
    """Each GPU that torch sees, none without torch: name, architecture, bytes of memory, and which part of it is ours.

    `share` is "" for all of it, and tells of a slice (MIG) or a share of its multiprocessors (MPS).
    """
    try:
        import torch

        from kog_triton.backends.device import gpu_of
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    rows = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        arch = getattr(seen, "gcnArchName", "") if torch.version.hip else ""
        part = gpu_of(torch.device("cuda", index))
        rows.append(
            {
                "name": seen.name,
                "arch": arch or f"sm_{seen.major}{seen.minor}",
                "memory_bytes": seen.total_memory,
                "share": part.share if part else "",
            }
        )
    return rows


def unseen() -> str | None:
    """What this machine has that torch does not see, None if it sees all; it needs torch to say."""
    try:
        from kog_triton.backends.unseen_gpu import unseen_gpu
    except ImportError:
        return None
    gpu = unseen_gpu()
    return f"{gpu.name}: {gpu.advice}" if gpu else None


def findings() -> dict[str, dict[str, str]]:
    """By backend, what it needs and found, of those whose classes say so (`findings`) and that have anything here."""
    out = {}
    for name in backend_names():
        try:
            said = find_backend(name).findings()  # type: ignore[attr-defined]
        except Exception:  # none, or a broken package, of which the list of backends tells
            continue
        if said:
            out[name] = said
    return out


def report(found: dict[str, Any]) -> str:
    """The findings as text for people."""
    packages = found["packages"].items()
    lines = [f"kog_triton {found['kog_triton']}, Python {found['python']}, {found['platform']}"]
    lines.append(", ".join(f"{name} {v or '(not installed)'}" for name, v in packages))
    lines += ["", "GPUs"]
    lines += [
        f"  {i}  {g['name']}  {g['arch']}  {g['memory_bytes'] / 1e9:.0f} GB" + (f"  {g['share']}" if g["share"] else "")
        for i, g in enumerate(found["gpus"])
    ] or [f"  none seen by torch {found['packages']['torch'] or '(not installed)'}"]
    if found["unseen_gpu"]:
        lines.append(f"  but there is: {found['unseen_gpu']}")
    lines.append(f"  driver: {found['driver'] or 'none'}")
    lines += ["", "backends"]
    for b in found["backends"]:
        state = "ready" if b["available"] else "cannot run here"
        lines.append(f"  {b['name']:<10}{state:<17}{b['reason']}".rstrip())
        if b["advice"] and not b["available"]:
            lines.append(f"  {'':<10}-> {b['advice']}")
    for name, said in found.get("findings", {}).items():
        lines += ["", name, *(f"  {what:<10}{says}" for what, says in said.items())]
    if "memory" in found:
        lines += _surroundings(found)
    if "model" in found:
        model = found["model"]
        lines += ["", f"{model['path']} ({model['family']}, {model['num_parameters'] / 1e6:,.1f} M parameters)"]
        lines += [f"  {row['name']:<10}{row['says']}" for row in model["backends"]]
    demo = found["demo"]
    lines += ["", f"demo checkpoint: {'present' if demo['present'] else 'missing'}, {demo['path']}"]
    return "\n".join(lines)


def _surroundings(found: dict[str, Any]) -> list[str]:
    lines = ["", "memory"]
    held = found["memory"]
    if held["total_bytes"] is None:
        lines.append("  not known here")
    else:
        lines.append(f"  {held['available_bytes'] / 1e9:,.1f} GB free of {held['total_bytes'] / 1e9:,.1f}")
    lines += ["", "optional packages"]
    for name, package in found["optional"].items():
        lines.append(f"  {name:<14}{package['version'] or '(not installed)':<17}{package['for']}")
    lines += ["", "caches (kog cache lists and clears them)"]
    for cache in found["caches"]:
        state = "" if cache["writable"] else "  cannot be written"
        lines.append(
            f"  {cache['name']:<10}{cache['bytes'] / 1e6:>10,.1f} MB  {cache['path'] or 'nowhere: no home'}{state}"
        )
    return lines


def _body(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="kog doctor", description="Show what can run on this machine, and what is missing.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_checkpoint(parser, ": also what each backend would do with it")
    args = parser.parse_args(argv)
    check_revision(args.model, args.revision)
    found = examine(args.model, args.revision)
    print(json.dumps(found, indent=2) if args.json else printable(report(found), keep="\n"))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)


if __name__ == "__main__":
    end_process(main)
