"""Command line of the fuzzers: which target, how many cases, which engine.

    python -m tests.fuzz --target all --cases 20000 --seed 7 --json record.json
    python -m tests.fuzz --target header --seed 7 --show 123       one case, in this process
    python -m tests.fuzz --target config --engine atheris --cases 5000

Exits with 1 if there was a fault; each is printed with the number of its first case.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked child has no thread pool
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from . import guided, worker
from .table import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Attack the loader.")
    parser.add_argument("--target", default="all", choices=["all", *TARGETS])
    parser.add_argument("--cases", type=int, default=1000, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="seeded", choices=["seeded", "atheris"])
    parser.add_argument("--show", type=int, help="run this one case in this process, uncaught")
    parser.add_argument("--json", type=Path, help="write the records there")
    args = parser.parse_args()
    names = list(TARGETS) if args.target == "all" else [args.target]
    if args.show is not None:
        return show(names[0], args.seed, args.show)
    run = guided.fuzz if args.engine == "atheris" else worker.fuzz
    records = []
    for name in names:
        record = run(name, args.cases, args.seed)
        records.append(record)
        print(
            f"{name:<18}{record.cases:>8} cases {record.loaded:>8} loaded"
            f" {record.refused:>8} refused {len(record.faults):>4} faults"
            f" {record.seconds:>8.1f} s, slowest {record.slowest_s:.2f} s,"
            f" +{record.grown_memory_mib} MiB",
            flush=True,
        )
        for signature, found in record.faults.items():
            print(f"    case {found['first_case']} ({found['count']} times): {signature}")
        if args.json:
            args.json.write_text(json.dumps([asdict(r) for r in records], indent=2) + "\n")
    return int(any(record.faults for record in records))


def show(name: str, seed: int, number: int) -> int:
    """Print a case, then run it with nothing caught."""
    with tempfile.TemporaryDirectory() as folder:
        target = TARGETS[name](Path(folder))
        data = worker.make_case(target, seed, number)
        print(data, flush=True)
        print("loaded" if target.run(data) else "refused")
    return 0


if __name__ == "__main__":
    sys.exit(main())
