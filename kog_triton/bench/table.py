"""The README's table of results, generated from benchmarks/results alone.

`table(read_results(folder))` gives the Markdown that stands between MARKERS; a test compares. Of
several files of one GPU, model, test and number of GPUs the newest counts. Rows say what qualifies them:
a GPU that was held back, and a text that was judged behind fewer tokens than were timed.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from kog_triton.bench.record import SCHEMA
from kog_triton.errors import RequestError

MARKERS = ("<!-- results -->", "<!-- /results -->")
NAMES = ("GPU", "model", "test", "engine", "tokens/s", "p50 / p99 us", "TTFT ms", "MBU", "text")


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Every whole decode record below a folder, oldest first; RequestError for a file that is none, or no folder."""
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder: kog bench table --results DIR names another")
    records = []
    for file in sorted(folder.rglob("*.json")):
        try:
            record = json.loads(file.read_text())
            known = record["schema"] == SCHEMA
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{file}: not a record of kog bench") from error
        if not known:
            raise RequestError(f"{file}: its schema is {record['schema']!r}, not {SCHEMA!r}")
        try:
            if record["kind"] in ("decode", "compare") and not record["test"].get("interrupted"):
                table([record])
                records.append((datetime.fromisoformat(record["created"]).astimezone(), record))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(f"{file}: not a whole record of kog bench: {error!r}") from error
    return [record for _, record in sorted(records, key=lambda pair: pair[0])]


def table(records: list[dict[str, Any]]) -> str:
    """The newest record of each (GPU, model, test, number of GPUs), fastest engine first."""
    newest = {_key(record): record for record in records}
    if not newest:
        return "No results are kept yet."
    lines = ["| " + " | ".join(NAMES) + " |", "| " + " | ".join("---" for _ in NAMES) + " |"]
    absent = []
    limits: list[str] = []  # what held a GPU back, in the order of their marks
    for key in sorted(newest):
        rows, why = newest[key]["rows"], _held_back(newest[key])
        if why and why not in limits:
            limits.append(why)
        mark = f" [{limits.index(why) + 1}]" if why else ""
        depth = newest[key]["test"]["prompt_tokens"]
        timed = [row for row in rows if row["host"]]
        for row in sorted(timed, key=lambda row: -row["host"]["tokens_per_s"]):
            lines.append("| " + " | ".join((*key[:3], *_cells(row, depth, mark))) + " |")
        rest = [
            f"{row['name']} ({row['status']}: {row['note']})" for row in rows if not row["host"]
        ]
        if rest:
            absent.append(f"Not timed with {key[1]}, {key[2]} on {key[0]}: {', '.join(rest)}.")
    notes = [
        f"[{n}] The GPU was held back while the rows with this mark were timed: {why}."
        for n, why in enumerate(limits, 1)
    ]
    return "\n".join([*lines, *(f"\n{line}" for line in notes + absent)])


def between(text: str) -> str | None:
    """What stands between the markers of a text; None if they are not there."""
    start, end = text.find(MARKERS[0]), text.find(MARKERS[1])
    return text[start + len(MARKERS[0]) : end].strip() if 0 <= start < end else None


def write_between(file: Path, inside: str) -> None:
    """Replace what stands between the markers of a file; RequestError if it has none."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from error
    if between(text) is None:
        raise RequestError(f"{file}: the lines {MARKERS[0]} and {MARKERS[1]} are missing")
    head, tail = text.split(MARKERS[0], 1)[0], text.split(MARKERS[1], 1)[1]
    try:
        file.write_text(f"{head}{MARKERS[0]}\n{inside}\n{MARKERS[1]}{tail}", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{file}: cannot be written: {error.strerror}") from error


def _key(record: dict[str, Any]) -> tuple[str, str, str]:
    test = record["test"]
    gpus, sampling = test["num_gpus"], test.get("sampling", "greedy")
    name = test["name"] + (f", {sampling}" if sampling != "greedy" else "")
    gpu = (record["machine"]["gpu"] or "CPU").removeprefix("NVIDIA ")
    model = f"{record['model']['name']} {record['model']['dtype']}"
    return (f"{gpus} x {gpu}" if gpus > 1 else gpu), model, name


def _held_back(record: dict[str, Any]) -> str:
    """Why the GPU was slower than it can be while a record was made; "" if it was not, or nobody knows."""
    whys = (record["conditions"] or {}).get("throttled") or []
    # of a reason that is timed, the bare word says nothing more
    return ", ".join(why for why in whys if not any(w.startswith(f"{why} for ") for w in whys))


def _cells(row: dict[str, Any], depth: int, mark: str) -> tuple[str, ...]:
    """Of a row whose prompt has `depth` tokens; `mark` follows its tokens/s."""
    host, floor, check = row["host"], row["floor"], row["check"]
    mbu = floor["measured_mbu"]
    text = f"top-1 {check['top1']:.3f}, KL {check['kl_mean']:.0e}" if check else "not checked"
    if check and (judged := check.get("depth", check["positions"])) < depth:
        text += f"; tokens judged behind {judged:,}"
    name = f"**{row['name']}**" if row["kind"] == "backend" else row["version"] or row["name"]
    return (
        name if row["dtype"] != "f32" else f"{name}, f32",
        f"{host['tokens_per_s']:,.0f}{mark}",
        f"{host['itl_p50_us']:,.0f} / {host['itl_p99_us']:,.0f}",
        f"{row['ttft_us'] / 1e3:,.1f}",
        "-" if mbu is None else f"{mbu:.0%}",
        text,
    )
