"""The tables of results, generated from benchmarks/results alone.

`table(read_results(folder))` gives every row, `headline` the README's eight; `write_tables` puts them between the
markers of a file, and a test compares. Of several files of one GPU, model, test and number of GPUs the newest counts.
Rows say what qualifies them: a GPU that was held back, and a text that was judged after fewer tokens than were timed.
Of several requests at a time tokens/s are those of all; starts stand below the table.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from kog_triton.bench.record import SCHEMA, read_all, record_files, weights_of
from kog_triton.cli.arguments import write_text
from kog_triton.errors import RequestError

# Of benchmarks/ itself: kept beside, no rows of these tables.
OTHER_SCHEMAS = ("kog_triton.micro/1", "kog_triton.formats/1")
KINDS = ("decode", "compare", "prefill", "concurrency", "startup")
NAMES = ("GPU", "model", "test", "engine", "tokens/s", "p50 / p99 us", "TTFT ms", "MBU", "text")
# What the README shows, in its order: GPU, model, test, and the engine's name in its record. Peers of other models are
# in its picture (benchmarks/picture.py).
HEADLINE = (
    ("H200", "llama-3.2-1b bf16", "tg256 @ d32", "cuda"),
    ("H200", "llama-3.2-1b bf16", "tg256 @ d32", "triton"),
    ("H200", "llama-3.2-1b bf16", "tg256 @ d32", "transformers-tuned"),
    ("H200", "llama-3.2-1b bf16", "tg256 @ d32, temperature 0.7, top-p 0.95", "cuda"),
    ("H200", "llama-3.2-1b bf16", "tg128 @ d32768", "cuda"),
    ("H200", "llama-3.2-1b bf16", "8 x tg128 @ d32", "cuda"),
    ("H200", "laneformer-2b f16", "tg256 @ d32", "cuda"),
    ("H200", "qwen3-8b bf16", "tg256 @ d32", "cuda"),
)


class Line(NamedTuple):
    """A row of a table: where it belongs, its cells, and what held its GPU back, "" if nothing did."""

    place: tuple[str, str, str, str]  # GPU, model, test, the engine's name in the record
    cells: tuple[str, ...]  # from the engine on
    held_back: str


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Every whole record of KINDS below a folder, oldest first; RequestError for a file that is none, or no folder."""
    if not folder.is_dir():
        raise RequestError(f"{folder}: no such folder: kog bench table --results DIR names another")
    records = []
    for file in record_files(folder):
        try:
            found = [(record["schema"], record) for record in read_all(file)]
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{file}: not a record of kog bench") from error
        for schema, record in found:
            if schema in OTHER_SCHEMAS:
                continue
            if schema != SCHEMA:
                raise RequestError(f"{file}: its schema is {schema!r}, not {SCHEMA!r}")
            try:
                if record["kind"] in KINDS and not record["test"].get("interrupted"):
                    table([record])
                    records.append((datetime.fromisoformat(record["created"]).astimezone(), record))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RequestError(f"{file}: not a whole record of kog bench: {error!r}") from error
    return [record for _, record in sorted(records, key=lambda pair: pair[0])]


def table(records: list[dict[str, Any]]) -> str:
    """The newest record of each (GPU, model, test, number of GPUs), fastest engine first, and what stands below."""
    newest = newest_of(records)
    if not newest:
        return "No results are kept yet."
    below = []
    for key, record in newest.items():
        if record["kind"] == "startup":
            below += _starts(key, record["rows"])
            continue
        rest = [f"{row['name']} ({row['status']}: {row['note']})" for row in record["rows"] if not is_timed(row)]
        if rest:
            below.append(f"Not timed with {key[1]}, {key[2]} on {key[0]}: {', '.join(rest)}.")
    return "\n".join([_rendered(list(_lines(newest))), *(f"\n{line}" for line in below)])


def headline(records: list[dict[str, Any]]) -> str:
    """The rows that HEADLINE names, in its order; one of which nothing is kept is left out."""
    lines = {line.place: line for line in _lines(newest_of(records))}
    return _rendered([lines[place] for place in HEADLINE if place in lines])


TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {"results": table, "headline": headline}


def newest_of(records: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Of records, oldest first: the newest of each (GPU, model, test), in their order."""
    newest = {_key(record): record for record in records}
    return {key: newest[key] for key in sorted(newest)}


def markers(name: str) -> tuple[str, str]:
    """The lines of a file between which a table of TABLES stands."""
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def between(text: str, name: str = "results") -> str | None:
    """What stands between the markers of a text; None if they are not there."""
    first, last = markers(name)
    start, end = text.find(first), text.find(last)
    return text[start + len(first) : end].strip() if 0 <= start < end else None


def write_tables(file: Path, records: list[dict[str, Any]]) -> None:
    """Write each table of TABLES between its markers of a file; RequestError if it has none."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{file}: cannot be read: {error.strerror}") from error
    there = [name for name in TABLES if between(text, name) is not None]
    if not there:
        lines = " or ".join(" and ".join(markers(name)) for name in TABLES)
        raise RequestError(f"{file}: the lines {lines} are missing")
    for name in there:
        first, last = markers(name)
        head, tail = text.split(first, 1)[0], text.split(last, 1)[1]
        text = f"{head}{first}\n{TABLES[name](records)}\n{last}{tail}"
    write_text(file, text)


def _lines(newest: dict[tuple[str, str, str], dict[str, Any]]) -> Iterator[Line]:
    """Every timed row: fewer requests first, then what is faster."""
    for key, record in newest.items():
        if record["kind"] == "startup":
            continue
        why, depth = _held_back(record), record["test"]["prompt_tokens"]
        for row in sorted(filter(is_timed, record["rows"]), key=_order):
            test = key[2]
            if record["kind"] == "concurrency":
                if row["requests"] == 1:
                    continue  # another record's row, which has more tokens
                test = f"{row['requests']} x {test.partition(' x ')[2]}"
            yield Line((*key[:2], test, row["name"]), _cells(row, depth), why)


def _rendered(lines: list[Line]) -> str:
    """Markdown: a table, and below it what held back the GPU of rows with a mark."""
    out = ["| " + " | ".join(NAMES) + " |", "| " + " | ".join("---" for _ in NAMES) + " |"]
    limits: list[str] = []  # what held a GPU back, in the order of their marks
    for line in lines:
        cells = list(line.cells)
        if line.held_back:
            if line.held_back not in limits:
                limits.append(line.held_back)
            # behind the figure that was timed: tokens/s, of a prompt alone its time
            timed = 3 if cells[1] == "-" else 1
            cells[timed] += f" [{limits.index(line.held_back) + 1}]"
        out.append("| " + " | ".join((*line.place[:3], *cells)) + " |")
    notes = [f"\n[{n}] The GPU was held back while these rows were timed: {why}." for n, why in enumerate(limits, 1)]
    return "\n".join(out + notes)


def _key(record: dict[str, Any]) -> tuple[str, str, str]:
    test = record["test"]
    gpus, sampling = test["num_gpus"], test.get("sampling", "greedy")
    name = test["name"] + (f", {sampling}" if sampling != "greedy" else "")
    gpu = (record["machine"]["gpu"] or "CPU").removeprefix("NVIDIA ")
    model = f"{record['model']['name']} {weights_of(record['model'])}"
    return (f"{gpus} x {gpu}" if gpus > 1 else gpu), model, name


def is_timed(row: dict[str, Any]) -> bool:
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
        line = f"From nothing to the first token of {key[1]} on {key[0]}, {row['name']}: {first:.1f} s"
        out.append(f"{line}, {min(others):.1f} with kernels kept from before." if others else f"{line}.")
    return out


def _held_back(record: dict[str, Any]) -> str:
    """Why the GPU was slower than it can be while a record was made; "" if it was not, or nobody knows."""
    whys = (record["conditions"] or {}).get("throttled") or []
    # of a reason that is timed, the bare word says nothing more
    return ", ".join(why for why in whys if not any(w.startswith(f"{why} for ") for w in whys))


def _cells(row: dict[str, Any], depth: int) -> tuple[str, ...]:
    """Of a row whose prompt has `depth` tokens."""
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
        f"{host['tokens_per_s']:,.0f}" if host else "-",
        f"{host['itl_p50_us']:,.0f} / {host['itl_p99_us']:,.0f}" if host else "-",
        f"{row['ttft_us'] / 1e3:,.1f}",
        "-" if mbu is None else f"{mbu:.0%}",
        text,
    )
