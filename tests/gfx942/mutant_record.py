"""Write down what became of the mutants of the HIP kernels' machine code.

    python -m tests.gfx942.mutant_record FOUND.json ...

takes the records of `tests.lib.gfx942.hip_mutants`, one a case, each of a whole case: in one call those of a case and
of all others that catch what lives in it. Of other cases what was written down before stays. mutants.json.xz says of
every case its object, how many mutants its requests reach and how many of those can differ (`idle`), how many were
caught, by how many runs at least each of the others was tried, and where each of those stands that live for a reason
(`REASONS`) or are caught in another case. One that lives for none is a failure.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lib import kept_rows
from tests.lib.gfx942.argued import alike
from tests.lib.gfx942.hip_mutants import REQUESTS, Record, explained, idle, numbered, place, tried
from tests.lib.gfx942.mutants import Mutant

KEPT = Path(__file__).parent / "mutants.json.xz"
LEAST_RUNS = 16  # of a mutant that lives
# Of a wait: what a walk over all ways through the code says (waits.py). Of all: argued.py.
REASONS = ("other ways need it", "no way needs it", "argued")


def of_case(path: Path) -> Record:
    """The record of a file, which names its case. ValueError if it is of another object than today's."""
    return Record.open(path, json.loads(path.read_text())["case"])


def caught_at(record: Record, made: Sequence[Mutant]) -> set[str]:
    """Where mutants were caught: each by its own name, and places of which all were."""
    lived = {one["place"] for one in record.found.values() if not one["caught"]}
    each = {numbered(record.case, made[int(n)]) for n, one in record.found.items() if one["caught"]}
    return each | ({one["place"] for one in record.found.values()} - lived)


def row(record: Record, others: dict[str, set[str]]) -> dict[str, Any]:
    """What became of a case's mutants. `others`: where other cases catch theirs. AssertionError for one not tried."""
    case, made = record.case, list(tried(record.case))
    can_differ = {str(n) for n, mutant in enumerate(made) if not idle(case, mutant)}
    assert set(record.found) == can_differ, f"{case}: tried are {len(record.found)}"
    lived = {int(n): one for n, one in record.found.items() if not one["caught"]}
    lives: dict[str, list[str]] = {}
    elsewhere: dict[str, str] = {}
    wrong: list[str] = []
    for number in sorted(lived):
        where, reason = numbered(case, made[number]), explained(case, made[number])
        of_it = {where, place(case, made[number])}
        other = next((o for o, places in others.items() if of_it & places and alike(case, o, where)), "")
        if reason:
            known = next((known for known in REASONS if reason.startswith(known)), "argued")
            lives.setdefault(known, []).append(where)
        elif other:
            elsewhere[where] = f"{other}: {Record.object_of(other)}"
        else:
            wrong.append(where)
    return {
        "case": case,
        "object": record.object_of(case),
        "reached": len(made),
        "can differ": len(can_differ),
        "caught": sum(1 for one in record.found.values() if one["caught"]),
        "runs": min((one["seeds"] for one in lived.values()), default=LEAST_RUNS),
        "lives": dict(sorted(lives.items())),
        "elsewhere": dict(sorted(elsewhere.items())),
        "wrong": wrong,
    }


def failures(kept: Sequence[dict[str, Any]]) -> list[str]:
    """What the record tells of that must not be."""
    cases = {f"{one['case']}: {one['object']}" for one in kept}
    found = [f"{one['case']}: {where}" for one in kept for where in one["wrong"]]
    for one in kept:
        lives = sum(map(len, one["lives"].values())) + len(one["elsewhere"]) + len(one["wrong"])
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
    at = {one.case: caught_at(one, list(tried(one.case))) for one in records}
    for one in records:
        rows[one.case] = row(one, {case: places for case, places in at.items() if case != one.case})
    kept = [rows[case] for case in REQUESTS if case in rows]
    kept_rows.write(KEPT, kept)
    for failure in failures(kept):
        print("WRONG", failure)
    return 1 if failures(kept) else 0


if __name__ == "__main__":
    raise SystemExit(main())
