"""The README's table of results, generated from benchmarks/results alone.

`table(read_results(folder))` gives the Markdown that stands between MARKERS; a test compares. Of
several files of one GPU, model, test and number of GPUs the newest counts. Rows say what qualifies them:
a GPU that was held back, and a text that was judged after fewer tokens than were timed. Of several
requests at a time tokens/s are those of all; starts stand below the table.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from kog_triton.bench.record import SCHEMA
from kog_triton.cli.arguments import write_text
from kog_triton.errors import RequestError

OTHER_SCHEMAS = (
    "kog_triton.micro/1",
    "kog_triton.formats/1",
)  # of benchmarks/: kept beside, no rows of this table
MARKERS = ("<!-- results -->", "<!-- /results -->")
KINDS = ("decode", "compare", "prefill", "concurrency", "startup")
NAMES = ("GPU", "model", "test", "engine", "tokens/s", "p50 / p99 us", "TTFT ms", "MBU", "text")


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Every whole record of KINDS below a folder, oldest first; RequestError for a file that is none, or no folder."""
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder: kog bench table --results DIR names another")
    records = []
    for file in sorted(folder.rglob("*.json")):
        try:
            record = json.loads(file.read_text())
            known = record["schema"] == SCHEMA
            other = record["schema"] in OTHER_SCHEMAS
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{file}: not a record of kog bench") from error
        if other:
            continue
        if not known:
            raise RequestError(f"{file}: its schema is {record['schema']!r}, not {SCHEMA!r}")
        try:
            if record["kind"] in KINDS and not record["test"].get("interrupted"):
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
    below = []
    limits: list[str] = []  # what held a GPU back, in the order of their marks
    for key in sorted(newest):
        record, rows, why = newest[key], newest[key]["rows"], _held_back(newest[key])
        if record["kind"] == "startup":
            below += _starts(key, rows)
            continue
        if why and why not in limits:
            limits.append(why)
        mark = f" [{limits.index(why) + 1}]" if why else ""
        depth = record["test"]["prompt_tokens"]
        for row in sorted(filter(_is_timed, rows), key=_order):
            test = key[2]
            if record["kind"] == "concurrency":
                if row["requests"] == 1:
                    continue  # another record's row, which has more tokens
                test = f"{row['requests']} x {test.partition(' x ')[2]}"
            lines.append("| " + " | ".join((*key[:2], test, *_cells(row, depth, mark))) + " |")
        rest = [
            f"{row['name']} ({row['status']}: {row['note']})" for row in rows if not _is_timed(row)
        ]
        if rest:
            below.append(f"Not timed with {key[1]}, {key[2]} on {key[0]}: {', '.join(rest)}.")
    notes = [
        f"[{n}] The GPU was held back while the rows with this mark were timed: {why}."
        for n, why in enumerate(limits, 1)
    ]
    return "\n".join([*lines, *(f"\n{line}" for line in notes + below)])


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
    write_text(file, f"{head}{MARKERS[0]}\n{inside}\n{MARKERS[1]}{tail}")


def _key(record: dict[str, Any]) -> tuple[str, str, str]:
    test = record["test"]
    gpus, sampling = test["num_gpus"], test.get("sampling", "greedy")
    name = test["name"] + (f", {sampling}" if sampling != "greedy" else "")
    gpu = (record["machine"]["gpu"] or "CPU").removeprefix("NVIDIA ")
    model = f"{record['model']['name']} {record['model']['dtype']}"
    return (f"{gpus} x {gpu}" if gpus > 1 else gpu), model, name


def _is_timed(row: dict[str, Any]) -> bool:
    return bool(row["host"]) or row["ttft_us"] is not None


def _order(row: dict[str, Any]) -> tuple[int, float]:
    """Fewer requests first, then what is faster."""
    speed = -row["host"]["tokens_per_s"] if row["host"] else row["ttft_us"]
    return row.get("requests") or 1, speed


def _starts(key: tuple[str, str, str], rows: list[dict[str, Any]]) -> list[str]:
    """A sentence a backend: of the start that compiles, and of the fastest that finds it compiled."""
    out = []
    for row in rows:
        first, *others = row["startup"]["total_s"]
        line = (
            f"From nothing to the first token of {key[1]} on {key[0]}, {row['name']}: {first:.1f} s"
        )
        out.append(
            f"{line}, {min(others):.1f} with kernels kept from before." if others else f"{line}."
        )
    return out


def _held_back(record: dict[str, Any]) -> str:
    """Why the GPU was slower than it can be while a record was made; "" if it was not, or nobody knows."""
    whys = (record["conditions"] or {}).get("throttled") or []
    # of a reason that is timed, the bare word says nothing more
    return ", ".join(why for why in whys if not any(w.startswith(f"{why} for ") for w in whys))


def _cells(row: dict[str, Any], depth: int, mark: str) -> tuple[str, ...]:
    """Of a row whose prompt has `depth` tokens; `mark` follows its tokens/s."""
    host, check = row["host"], row["check"]
    mbu = row["floor"]["measured_mbu"] if host else None  # of a prompt it says how little is read
    text = f"top-1 {check['top1']:.3f}, KL {check['kl_mean']:.0e}" if check else "not checked"
    if check and (judged := check.get("depth", check["positions"])) < depth:
        text += f"; tokens judged behind {judged:,}"
    if row.get("over_one"):
        text += f"; {row['over_one']:.2f} times one's tokens"
    name = f"**{row['name']}**" if row["kind"] == "backend" else row["version"] or row["name"]
    return (
        name if row["dtype"] != "f32" else f"{name}, f32",
        f"{host['tokens_per_s']:,.0f}{mark}" if host else "-",
        f"{host['itl_p50_us']:,.0f} / {host['itl_p99_us']:,.0f}" if host else "-",
        f"{row['ttft_us'] / 1e3:,.1f}{'' if host else mark}",
        "-" if mbu is None else f"{mbu:.0%}",
        text,
    )
