"""The end of every microbenchmark: its figures printed beside those that Kog reports, and its record.

Kog's are what it has published of its own engine and hardware, all in SOURCE; none was measured here.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

from kog_triton.bench import machine

SCHEMA = "kog_triton.micro/1"
SOURCE = "Building a single-kernel, latency-optimized LLM inference engine on AMD MI300X GPUs, blog.kog.ai, May 2026"
REPORTED = {  # in SOURCE; microseconds, by microbenchmark
    "launch_cost": {"a kernel launch": "4.5"},
    "exchange": {"synchronization": "0.9, cut from 7.8", "an intermediate tensor's round trip": "more than 1"},
    "read_bandwidth": {},
}


def arguments(name: str, says: str) -> argparse.Namespace:
    """The command line; exits with one line where the record could not be written in the end."""
    parser = argparse.ArgumentParser(f"benchmarks/micro/{name}.py", description=says)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record of the run")
    args = parser.parse_args()
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"--json {args.json}: there is no folder {args.json.parent}")
    return args


def finish(name: str, unit: str, figures: dict[str, float], file: Path | None, note: str) -> None:
    """Print figures by method, in `unit`, and write them to `file`; `note` says what they hold for."""
    described = machine.describe()
    print(f"{described['gpu'] or described['cpu']}: {note}")
    for method, figure in figures.items():
        print(f"  {method:<9}{figure:9.3f} {unit}")
    for what, figure in REPORTED[name].items():
        print(f"  Kog reports, of its own engine and hardware: {what} {figure} us")
    if REPORTED[name]:
        print(f"  in: {SOURCE}")
    if file is None:
        return
    record = {
        "schema": SCHEMA,
        "name": name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": described,
        "note": note,
        "unit": unit,
        "figures": figures,
        "reported_by_kog_us": REPORTED[name],
        "reported_in": SOURCE if REPORTED[name] else None,
    }
    file.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
