"""What `kog plan --gpus N` predicts beside what `kog bench decode` measured: docs/SCALING.md's table, and the best fit.

    for n in 1 2; do kog bench decode --shape llama-3.2-1b --gpus $n --max-tokens 256 --json llama-3.2-1b-$n.json; done
    python benchmarks/scaling.py *.json [--fit llama-3.2-1b qwen3-8b laneformer-2b]

Tokens/s are by the GPU's clock. The formula gets the bytes of a step at its mean depth, and the bandwidth that was
measured in the same run. `--fit`: the constants of kog_triton/schedule/scaling.py that fit these shapes best, and what
they say of all records; shapes that were not fitted test the formula.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kog_triton.bench.record import read_all
from kog_triton.errors import KogError, RequestError
from kog_triton.model.shapes import named_shape
from kog_triton.schedule.scaling import BLEND, KEPT, SHARE, predict
from kog_triton.schedule.schedule import build

BLENDS, KEPTS = np.arange(1.0, 8.01, 0.1), np.arange(0.9, 1.101, 0.01)  # that are tried


@dataclass(frozen=True)
class Measured:
    """A row of a record. `bandwidth`: of one GPU, bytes a second."""

    shape: str
    gpus: int
    depth: int
    tokens: int
    bandwidth: float
    rate: float

    def predicted(self, blend: float = BLEND, kept: float = KEPT) -> float:
        """Tokens/s by the formula, which takes SHARE of a datasheet's bandwidth."""
        spec = named_shape(self.shape)
        per_gpu = spec.decode_bytes(self.depth, self.tokens) / self.gpus
        schedule = build(spec, self.gpus)
        return 1 / predict(schedule, per_gpu, self.bandwidth / SHARE, blend, kept)


def rows_of(file: Path) -> list[Measured]:
    """The CUDA backend's rows; RequestError for a file that is no record of decode of a shape, or has none."""
    try:
        return [row for record in read_all(file) for row in _measured(record)]
    except (OSError, ValueError, KeyError, TypeError, KogError) as error:
        raise RequestError(f"{file}: not a record of kog bench decode --shape: {error}") from error


def _measured(record: Any) -> list[Measured]:
    test, gpus = record["test"], record["test"]["num_gpus"]
    if record["kind"] != "decode" or not record["bandwidth"]["measured"]:
        raise ValueError("no decode on a GPU")
    bandwidth = record["bandwidth"]["measured"] / gpus
    shape, depth, tokens = record["model"]["name"], test["prompt_tokens"], test["tokens"]
    rates = [row["device"]["tokens_per_s"] for row in record["rows"] if row["name"] == "cuda" and row["device"]]
    if not rates:
        raise ValueError("it has no times of the cuda backend")
    named_shape(shape)
    return [Measured(shape, gpus, depth, tokens, bandwidth, rate) for rate in rates]


def best_fit(rows: Sequence[Measured]) -> tuple[float, float]:
    """BLEND and KEPT with the least sum of squares of log(predicted / measured)."""

    def misses(blend: float, kept: float) -> float:
        return sum(np.log(row.predicted(blend, kept) / row.rate) ** 2 for row in rows)

    return min(((float(b), float(k)) for b in BLENDS for k in KEPTS), key=lambda pair: misses(*pair))


def table(rows: Sequence[Measured], blend: float, kept: float) -> str:
    lines = ["| shape | GPUs | measured, tokens/s | formula | off by |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(rows, key=lambda r: (r.shape, r.gpus)):
        said = row.predicted(blend, kept)
        lines.append(
            f"| {row.shape} | {row.gpus} | {row.rate:,.0f} | {said:,.0f} | {100 * (said / row.rate - 1):+.1f}% |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    parser.add_argument("--fit", nargs="+", default=[], metavar="SHAPE")
    args = parser.parse_args(argv)
    try:
        rows = [row for file in args.records for row in rows_of(file)]
        if absent := sorted(set(args.fit) - {row.shape for row in rows}):
            raise RequestError(f"--fit {absent[0]}: no record has it")
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"BLEND {BLEND:g}, KEPT {KEPT:g}, as they are:\n\n{table(rows, BLEND, KEPT)}")
    if args.fit:
        blend, kept = best_fit([row for row in rows if row.shape in args.fit])
        print(f"\nBLEND {blend:.1f}, KEPT {kept:.2f}, fitted to {', '.join(args.fit)}:\n")
        print(table(rows, blend, kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
