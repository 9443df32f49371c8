"""The JSON of one run, as result.schema.json describes it, and where results are kept.

benchmarks/results/<gpu>/<date>-<name>.json, or .json.xz where raw samples make it long, or the tree is short of room:
`xzcat` shows it. Those that take less room together are lines of <date>.jsonl.xz.
"""

import json
import lzma
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kog_triton.errors import KogError, RequestError

ROUNDED = "layers round to nearest "  # in a model's `weights`, before the format
SCHEMA = "kog_triton.bench/1"
RESULTS = Path("benchmarks") / "results"
LONG = 8 << 10  # bytes of text from which on a kept record is compressed, to a sixth
# As small as records become: 1 % smaller than by the preset alone.
PACKED = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


MOST_NOTE = 300  # characters
MEASURED = (  # of an engine: null where it is not
    "version", "dtype", "load_s", "memory_bytes", "check", "host", "device", "ttft_us", "ttft_us_rounds",
    "prompt_tokens_per_s", "repeatable", "floor", "kernels", "startup",
)  # fmt: skip


def note_of(error: Exception) -> str:
    """What a row says of an error, in one line; of one that is not ours, its kind too."""
    what = str(error) if isinstance(error, KogError) else f"{type(error).__name__}: {error}"
    return " ".join(what.split())[:MOST_NOTE]


def make_row(name: str, kind: str, status: str, note: str) -> dict[str, Any]:
    """A row about one engine with nothing measured yet; status: timed, wrong, absent or failed."""
    return {"name": name, "kind": kind, "status": status, "note": note, **dict.fromkeys(MEASURED)}


def make_record(
    kind: str,
    argv: list[str],
    model: dict[str, Any],
    machine: dict[str, Any],
    test: dict[str, Any],
    measured: dict[str, Any],
    target: dict[str, Any] | None,
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "kind": kind,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": argv,
        "model": model,
        "machine": machine,
        "test": test,
        **measured,
        "target": target,
    }


def target_of(rows: list[dict[str, Any]], tps: float | None) -> dict[str, Any] | None:
    """Whether the fastest of our backends reached `tps` tokens/s, as they arrive at the host."""
    if tps is None:
        return None
    ours = [r for r in rows if r["kind"] == "backend" and r["host"]]
    best = max(ours, key=lambda r: r["host"]["tokens_per_s"], default=None)
    reached = best["host"]["tokens_per_s"] if best else 0.0
    by = best["name"] if best else None
    return {"tokens_per_s": tps, "reached": reached, "by": by, "met": reached >= tps}


def text_of(record: dict[str, Any]) -> str:
    """One line a leaf list, so that raw samples do not bury the rest."""
    text = json.dumps(record, indent=2, allow_nan=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: " ".join(m[0].split()), text) + "\n"


def write(record: dict[str, Any], file: Path) -> None:
    """RequestError where that fails."""
    data = text_of(record).encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(lzma.compress(data, filters=PACKED) if file.suffix == ".xz" else data)
    except OSError as error:
        raise RequestError(f"{file}: cannot be written: {error.strerror}") from error


def weights_of(model: dict[str, Any]) -> str:
    """What the weights of a record's model are, in a word: the format its layers were rounded to, else their type."""
    return str(model["weights"].partition(ROUNDED)[2] or model["dtype"])


def record_files(folder: Path) -> list[Path]:
    """Of every record below a folder, in the order of their names."""
    return sorted(f for kind in ("json", "json.xz", "jsonl.xz") for f in folder.rglob(f"*.{kind}"))


def read_all(file: Path) -> list[Any]:
    """The records of a file: one that was put together, `.jsonl.xz`, has one a line. OSError or ValueError if one
    is none."""
    if not file.name.endswith(".jsonl.xz"):
        return [read(file)]
    try:
        return [json.loads(line) for line in lzma.decompress(file.read_bytes()).splitlines()]
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error


def read(file: Path) -> Any:
    """What a record holds; OSError or ValueError if it is none."""
    data = file.read_bytes()
    try:
        return json.loads(lzma.decompress(data) if file.suffix == ".xz" else data)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error


def check_name(name: str) -> None:
    """RequestError for what `--save` cannot make a file's name of."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
        raise RequestError(f"--save {name}: a name of a-z, 0-9, '.', '_' and '-' is needed")


def kept_file(record: dict[str, Any], name: str, results: Path = RESULTS) -> Path:
    """Where `--save NAME` puts a record: by GPU and date. RequestError for a name that is a path."""
    check_name(name)
    gpu = (record["machine"]["gpu"] or "cpu").lower()
    gpu = re.sub(r"[^a-z0-9]+", "-", gpu.removeprefix("nvidia ").removeprefix("amd "))
    kind = "json.xz" if len(text_of(record)) > LONG else "json"
    return results / gpu.strip("-") / f"{record['created'][:10]}-{name}.{kind}"
