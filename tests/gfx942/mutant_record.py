"""Write down what became of the mutants of the HIP kernels' machine code.

    python -m tests.gfx942.mutant_record FOUND.json ...

takes the records of `tests.lib.gfx942.hip_mutants`, one a case, each of a whole case: in one call those of a case and
of all others that catch what lives in it. Of other cases what was written down before stays. mutants.json.xz says of
every case its object, how many mutants can differ, how many were caught, by how many runs at least each of the others
was tried, and how many of those live for which reason (`REASONS`) or are caught in another case. One that lives for
none is a failure.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lib import kept_rows
from tests.lib.gfx942.hip_mutants import REQUESTS, Record, explained, idle, place, tried

KEPT = Path(__file__).parent / "mutants.json.xz"
LEAST_RUNS = 16  # of a mutant that lives
# Of a wait: what a walk over all ways through the code says (waits.py). Of all: ARGUED and ARGUED_OF.
REASONS = ("other ways need it", "no way needs it", "argued")


def of_case(path: Path) -> Record:
    """The record of a file, which names its case. ValueError if it is of another object than today's."""
    return Record.open(path, json.loads(path.read_text())["case"])


def caught_at(record: Record) -> set[str]:
    """Places of which every mutant was caught."""
    lived = {one["place"] for one in record.found.values() if not one["caught"]}
    return {one["place"] for one in record.found.values()} - lived


def row(record: Record, others: Sequence[Record]) -> dict[str, Any]:
    """What became of a case's mutants. AssertionError if some were not tried."""
    case, made = record.case, list(tried(record.case))
    can_differ = {str(n) for n, mutant in enumerate(made) if not idle(case, mutant)}
    assert set(record.found) == can_differ, f"{case}: tried are {len(record.found)}"
    lived = {int(n): one for n, one in record.found.items() if not one["caught"]}
    why: Counter[str] = Counter()
    elsewhere: dict[str, str] = {}
    wrong: list[str] = []
    for number in lived:
        where, reason = place(case, made[number]), explained(case, made[number])
        of_wait = [known for known in REASONS if reason.startswith(known)]
        other = next((r.case for r in others if where in caught_at(r)), "")
        if reason:
            why[of_wait[0] if of_wait else "argued"] += 1
        elif other:
            why["elsewhere"] += 1
            elsewhere[where] = f"{other}: {Record.object_of(other)}"
        else:
            wrong.append(where)
    return {
        "case": case,
        "object": record.object_of(case),
        "can differ": len(can_differ),
        "caught": sum(1 for one in record.found.values() if one["caught"]),
        "runs": min((one["seeds"] for one in lived.values()), default=LEAST_RUNS),
        "lives": dict(sorted(why.items())),
        "elsewhere": dict(sorted(elsewhere.items())),
        "wrong": sorted(wrong),
    }


def failures(kept: Sequence[dict[str, Any]]) -> list[str]:
    """What the record tells of that must not be."""
    cases = {f"{one['case']}: {one['object']}" for one in kept}
    found = [f"{one['case']}: {where}" for one in kept for where in one["wrong"]]
    for one in kept:
        lives = sum(one["lives"].values()) + len(one["wrong"])
        if one["caught"] + lives != one["can differ"] or one["runs"] < LEAST_RUNS:
            found.append(f"{one['case']}: {one['caught']} caught, {lives} live, {one['runs']} runs")
        others = set(one["elsewhere"].values()) - cases
        found += [f"{one['case']}: what {other} catches is of no row" for other in sorted(others)]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gfx942.mutant_record")
    parser.add_argument("found", nargs="+", type=Path, help="records of hip_mutants, a case each")
    records = [of_case(path) for path in parser.parse_args(argv).found]
    rows = {one["case"]: one for one in kept_rows.read(KEPT)} if KEPT.exists() else {}
    for one in records:
        rows[one.case] = row(one, [other for other in records if other is not one])
    kept = [rows[case] for case in REQUESTS if case in rows]
    kept_rows.write(KEPT, kept)
    for failure in failures(kept):
        print("WRONG", failure)
    return 1 if failures(kept) else 0


if __name__ == "__main__":
    raise SystemExit(main())
