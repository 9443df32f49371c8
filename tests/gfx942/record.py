"""Run everything on the executor with many seeds, and write down what was run and of which code objects.

    TRITON_INTERPRET=1 python -m tests.gfx942.record [--seeds 16] [--litmus 1000]

record.json says of the Triton kernel's objects and of the litmus kernels: SHA-256, compiler, seeds, instructions, and
what went wrong: nothing, or this command fails.
"""

import argparse
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.lib.gfx942.backends import COMPILERS
from tests.lib.gfx942.executor import PLAIN, Kernel
from tests.lib.gfx942.litmus import ARGUED, LITMUS, MAPS, memory_of, run
from tests.lib.gfx942.mutants import caught, mutants
from tests.lib.gfx942.requests import ASKED, expected, run_request
from tests.lib.gfx942.triton_backend import Conditions
from tests.lib.gfx942.triton_cases import CASES, compiled

RECORD = Path(__file__).parent / "record.json"


def conditions(seed: int) -> Conditions:
    """Every other seed in plain memory; both with short and long quanta, workgroups on XCDs in several ways."""
    memory = memory_of(seed) if seed % 2 else PLAIN
    return Conditions(memory, seed, MAPS[seed % len(MAPS)])


def requests(seeds: int) -> list[dict[str, Any]]:
    """Whole requests of every case against the reference: greedy, sampled, a prompt in chunks, all sampling rules."""
    rows = []
    for case in CASES:
        for name, asked in ASKED.items():
            made = compiled(case, asked.variant)
            wrong = [
                s
                for s in range(seeds)
                if run_request(case, conditions(s), name) != expected(case, name)
            ]
            row = {
                "case": case,
                "request": name,
                "object": made.code_object.sha256,
                "compiler": f"triton {made.triton}",
            }
            rows.append(row | {"seeds": seeds, "wrong": wrong})
            print(case, name, "wrong:", wrong, flush=True)
    return rows


def litmus(seeds: int) -> list[dict[str, Any]]:
    """The exchanges, right in every seed; their mutants, by how many were caught."""
    rows = []
    for compiler, compile_source in COMPILERS.items():
        source = compile_source("litmus.hip")
        for name in LITMUS:
            kernel = Kernel(source, name)
            wrong = [seed for seed in range(seeds) if run(kernel, seed)[0]]
            made = list(mutants(kernel))
            left = {
                m.named() for m in made if not caught(m.kernel, lambda k, seed: run(k, seed)[0])
            }
            row = {
                "kernel": name,
                "object": source.sha256,
                "compiler": compiler,
                "seeds": seeds,
                "wrong": wrong,
            }
            rows.append(
                row
                | {
                    "mutants": len(made),
                    "survive": {one: ARGUED[name].get(one, "") for one in sorted(left)},
                }
            )
            print(compiler, name, "wrong:", wrong, "survive:", sorted(left), flush=True)
    return rows


def failures(record: dict[str, Any]) -> list[str]:
    """What the record tells of that must not be."""
    found = [
        f"{row.get('case', row.get('kernel'))}: seeds {row['wrong']}"
        for part in ("requests", "litmus")
        for row in record[part]
        if row["wrong"]
    ]
    return found + [
        f"{row['kernel']}: {one}"
        for row in record["litmus"]
        for one, why in row["survive"].items()
        if not why
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gfx942.record", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=16, help="of whole requests")
    parser.add_argument("--litmus", type=int, default=1000, help="of litmus kernels")
    args = parser.parse_args(argv)
    record = {
        "what": "executed on a CPU, instruction by instruction, in plain and adversarial memory; not on AMD hardware",
        "tinygrad": version("tinygrad"),
        "requests": requests(args.seeds),
        "litmus": litmus(args.litmus),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    for failure in failures(record):
        print("WRONG", failure)
    return 1 if failures(record) else 0


if __name__ == "__main__":
    raise SystemExit(main())
