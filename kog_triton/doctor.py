"""`kog doctor`: what can run on this machine, what is missing, and what to install.

Looks and reports; it loads no model and exits with 0 whatever it finds. `--json` prints the same as
one JSON document.
"""

import json
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kog_triton import __version__
from kog_triton.backends.choose import survey
from kog_triton.cli.arguments import Parser
from kog_triton.cli.command import run
from kog_triton.demo import checkpoint_path

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "cupy-cuda13x",
    "cupy-rocm-7-0",
)
DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))


def examine() -> dict[str, Any]:
    """Everything that `kog doctor` shows, ready for JSON."""
    demo = checkpoint_path()
    return {
        "kog_triton": __version__,
        "python": platform.python_version(),
        "platform": system(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "driver": driver(),
        "gpus": gpus(),
        "backends": [asdict(candidate) for candidate in survey()],
        "demo": {"path": str(demo), "present": (demo / "config.json").is_file()},
    }


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
    """Name, architecture and bytes of memory of each GPU that torch sees; none without torch."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    rows = []
    for index in range(torch.cuda.device_count()):
        seen = torch.cuda.get_device_properties(index)
        arch = getattr(seen, "gcnArchName", "") if torch.version.hip else ""
        rows.append(
            {
                "name": seen.name,
                "arch": arch or f"sm_{seen.major}{seen.minor}",
                "memory_bytes": seen.total_memory,
            }
        )
    return rows


def report(found: dict[str, Any]) -> str:
    """The findings as text for people."""
    packages = found["packages"].items()
    lines = [f"kog_triton {found['kog_triton']}, Python {found['python']}, {found['platform']}"]
    lines.append(", ".join(f"{name} {v or '(not installed)'}" for name, v in packages))
    lines += ["", "GPUs"]
    lines += [
        f"  {i}  {g['name']}  {g['arch']}  {g['memory_bytes'] / 1e9:.0f} GB"
        for i, g in enumerate(found["gpus"])
    ] or [f"  none seen by torch {found['packages']['torch'] or '(not installed)'}"]
    lines.append(f"  driver: {found['driver'] or 'none'}")
    lines += ["", "backends"]
    for b in found["backends"]:
        state = "ready" if b["available"] else "cannot run here"
        lines.append(f"  {b['name']:<10}{state:<17}{b['reason']}".rstrip())
        if b["advice"] and not b["available"]:
            lines.append(f"  {'':<10}-> {b['advice']}")
    demo = found["demo"]
    lines += ["", f"demo checkpoint: {'present' if demo['present'] else 'missing'}, {demo['path']}"]
    return "\n".join(lines)


def _body(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="kog doctor", description="Show what can run on this machine, and what is missing."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    found = examine()
    print(json.dumps(found, indent=2) if args.json else report(found))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run(_body, argv)


if __name__ == "__main__":
    sys.exit(main())
