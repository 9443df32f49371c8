"""`kog bench kccl`: all-reduces inside a kernel, beside NCCL and torch's symmetric memory, in one run.

Ours are dependent: each needs the sum before, in one kernel on every GPU, with and without a stream of weights beside.
Those of torch are whole kernels in a CUDA graph. A backend names its all-reduce under the entry point group
`kog_triton.collectives`: (policy, GPUs, floats, uses, whether weights are streamed) -> microseconds and GB/s.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table

from kog_triton.cli.console import Output, plain_table
from kog_triton.errors import DeviceError, RunError

GROUP = "kog_triton.collectives"
POLICIES = ("phase", "epoch", "poison")
KIB = (1, 2, 4, 8, 16, 32, 64)
GPUS = (2, 4, 8)
USES = 10_000
PATIENCE_S = 300  # for all of torch's processes together


class Timed(Protocol):
    """What a backend found."""

    @property
    def microseconds(self) -> float: ...
    @property
    def gigabytes_per_s(self) -> float: ...


AllReduce = Callable[[str, int, int, int, bool], Timed]
Say = Callable[[str], None]


def all_reduces() -> AllReduce:
    """The one that an installed backend has; DeviceError if none has."""
    for entry in entry_points(group=GROUP):
        found: AllReduce = entry.load()
        return found
    raise DeviceError("no backend with collectives is installed: pip install -e '.[cuda]'")


def measure(ours: AllReduce, gpus: int, kib: Sequence[int], uses: int, say: Say) -> dict[str, Any]:
    """The record: microseconds of an all-reduce, {name: {bytes: us}}; GB/s of the streams beside."""
    rows: dict[str, dict[int, float]] = {}
    streamed: dict[str, dict[int, float]] = {}
    for policy in POLICIES:
        for streams in (False, True):
            name = f"{policy}, streaming" if streams else policy
            rows[name] = {}
            for size in kib:
                timed = ours(policy, gpus, size * 256, uses, streams)
                rows[name][1024 * size] = timed.microseconds
                if streams:
                    streamed.setdefault(policy, {})[1024 * size] = timed.gigabytes_per_s
                say(f"{name}, {size} KiB: {timed.microseconds:.2f} us")
    rows |= torch_rows(gpus, "nccl", [1024 * size for size in kib])
    return {"gpus": gpus, "uses": uses, "microseconds": rows, "streamed_gb_per_s": streamed}


def torch_rows(ranks: int, backend: str, sizes: Sequence[int]) -> dict[str, dict[int, float]]:
    """torch's, by a process a rank; RunError with the last line of the first that fails."""
    module = "kog_triton.bench.peers.torch_collectives"
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/rendezvous"
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(ranks), address, backend, *map(str, sizes)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            told = [process.communicate(timeout=PATIENCE_S) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{backend} did not end within {PATIENCE_S} s") from error
        finally:
            for process in processes:  # one that failed leaves the others waiting
                process.kill()
                process.wait()
    for process, (_, complaint) in zip(processes, told, strict=True):
        if process.returncode:
            last = (complaint.strip().splitlines() or ["no word"])[-1]
            raise RunError(f"{backend} through torch: {last}")
    found = json.loads(told[0][0].strip().splitlines()[-1])
    return {name: {int(size): us for size, us in row.items()} for name, row in found.items()}


def table(record: dict[str, Any]) -> Table:
    """A row a size: microseconds of each, with the stream's GB/s beside those that stream."""
    rows, streamed = record["microseconds"], record["streamed_gb_per_s"]
    title = f"all-reduce over {record['gpus']} GPUs, us; ours: mean of {record['uses']:,} in one kernel"
    out = plain_table(["KiB", *rows], title)
    for size in next(iter(rows.values())):
        cells = []
        for name, row in rows.items():
            beside = streamed.get(name.removesuffix(", streaming"), {}).get(size)
            shown = f"{row[size]:.2f}"
            cells.append(f"{shown} at {beside:,.0f} GB/s" if ", " in name and beside else shown)
        out.add_row(str(size // 1024), *cells)
    return out


def bench(args: argparse.Namespace, say: Say) -> None:
    """What `kog bench kccl` does."""
    record = measure(all_reduces(), args.gpus, args.kib, args.uses, say)
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n")
    Output().write_table(table(record))
