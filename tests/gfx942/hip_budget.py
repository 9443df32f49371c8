"""What the HIP kernel's machine code issues and has on its way, stage by stage, at 4.2 TB/s and 2 us: a budget, no
measurement on AMD hardware.

    python -m tests.gfx942.hip_budget [MODEL ..] [--keep | --blocks N --position N]

A model of full width and few layers walks one token in the executor (full_width.py): minutes. --keep writes the first
token's count and one's behind DEEP others to hip_budget.json, which --kept prints.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kog_triton.json_file import in_lines
from kog_triton.model.shapes import named_shape
from kog_triton.schedule.hip import asked_blocks
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.gfx942.budget import BANDWIDTH, CLOCK, CYCLES

KEPT = Path(__file__).parent / "hip_budget.json"
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "laneformer-2b")
LATENCY = 2.0  # us
ON_WAY = BANDWIDTH * LATENCY * 1e-6  # bytes
DEEP = 4000  # tokens before one
MOST_SLOTS = 0.6  # of the issue slots that pass while weights, or keys and values, come
SLOTS = CLOCK * 1e-6 / CYCLES  # of a SIMD in a us
COVER = 1.5  # times `needed`
COVER_LEFT = 1.2  # times that, when a look for words is answered
Row = dict[str, Any]


def kept() -> dict[str, Row]:
    """By model: the layers that ran, of how many; by stage slots of a SIMD (what it issues, at a quarter's rate four, a
    wait's first look) and bytes of weights, of a block. "depths": behind so many tokens bytes of a layer's keys and
    values, of a block, slots of the walk of them, of attention and the layer, what is idle of a token's time, KB on a
    block's way, and left by looks with weights behind (full_width.py)."""
    made: dict[str, Row] = json.loads(KEPT.read_text())
    return made


def share(row: Row, slots: int, size: int) -> float:
    """What part so many issue slots are of those that pass while so many bytes of every block come."""
    return float(slots / (size * row["blocks"] / BANDWIDTH * 1e6 * SLOTS))


def share_of_layer(row: Row, depth: Row) -> float:
    weights = sum(one["bytes"] for name, one in row["stages"].items() if name != "lm_head")
    return share(row, depth["layer"], depth["cache"] + weights)


def needed(row: Row) -> float:
    """Bytes that a block must have on their way for the bandwidth at LATENCY."""
    return ON_WAY / float(row["blocks"])


def matrices(row: Row) -> list[str]:
    return [name for name, one in row["stages"].items() if one["bytes"]]


def exceeded(row: Row) -> Iterator[str]:
    """What does not suffice."""
    for name, one in row["stages"].items():
        if one["bytes"] and (used := share(row, one["slots"], one["bytes"])) > MOST_SLOTS:
            yield f"{name}: {used:.0%} of the issue slots"
    for depth in row["depths"]:
        deep, behind = depth["position"] >= DEEP, f"behind {depth['position']:,} tokens"
        for name, (most, *left) in depth["way"].items():
            if name in matrices(row) and most * 1024 < COVER * needed(row):
                yield f"{name} {behind}: {most} KB on their way"
            if left and left[0] * 1024 < COVER_LEFT * needed(row) and not (deep and name == "attention"):
                yield f"{name} {behind}: {left[0]} KB left when a look is answered"
        if deep and (used := share(row, depth["walk"], depth["cache"])) > MOST_SLOTS:
            yield f"the walk of keys and values {behind}: {used:.0%} of the issue slots"
        if share_of_layer(row, depth) > MOST_SLOTS:
            yield f"a layer {behind}: {share_of_layer(row, depth):.0%} of the issue slots"


def lines(name: str, row: Row) -> Iterator[str]:
    yield (
        f"{name}: {row['blocks']} blocks, {row['layers']} of {row['of']} layers, {row['vgprs']} registers, "
        f"{row['spilled']} spilled; a block needs {needed(row):,.0f} bytes on their way: at most, and left"
    )
    for stage, one in row["stages"].items():
        us = one["bytes"] * row["blocks"] / BANDWIDTH * 1e6
        said = f"  {stage:<14}{one['bytes'] / 1024:>7.1f} KB {us:>7.2f} us {one['slots']:>7,} slots"
        said += f"{share(row, one['slots'], one['bytes']):>5.0%}" if us else " " * 5
        for depth in row["depths"]:
            times = ", ".join(f"{n * 1024 / needed(row):.2f}" for n in depth["way"][stage])
            said += f"   {times:<10} times at {depth['position']:,}"
        yield said
    for depth in row["depths"]:
        said = f"  behind {depth['position']:,} tokens {share_of_layer(row, depth):.0%} of the issue slots of a layer"
        if depth["position"] >= DEEP:
            walk, attention = (share(row, depth[what], depth["cache"]) for what in ("walk", "attention"))
            said += f", {walk:.0%} of its cache's for the walk, {attention:.0%}, without a bound, for attention"
        yield f"{said}; {depth['idle']:.1%} of a token's time idle"
    yield f"  beyond         {'; '.join(exceeded(row)) or 'nothing'}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gfx942.hip_budget", description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"by default {', '.join(MODELS)}")
    parser.add_argument("--keep", action="store_true", help=f"write {KEPT.name}")
    parser.add_argument("--kept", action="store_true", help="print what it holds, without a run")
    parser.add_argument("--blocks", type=int, default=0, help="of a GPU")
    parser.add_argument("--position", type=int, default=0, help="of the token, below 4096")
    args = parser.parse_args(argv)
    if (args.keep or args.kept) and (args.blocks or args.position):
        parser.error("what is kept has the usual blocks and depths")
    from tests.lib.gfx942.full_width import CONTEXT, use

    if not 0 <= args.position < CONTEXT:
        parser.error(f"--position {args.position}: from 0 to {CONTEXT - 1}")
    for name in args.models or MODELS:
        asked_blocks(build(named_shape(name)), GPUS["mi300x"], args.blocks)
    print(
        f"Assumed: {BANDWIDTH / 1e12} TB/s, {LATENCY} us from a load to its data, {CLOCK / 1e9} GHz, {CYCLES} cycles of"
        " a SIMD an instruction of a wave, 16 one of a quarter's rate. Nothing of this was measured on AMD hardware."
    )
    rows = {}
    for name in args.models or MODELS:
        rows[name] = kept()[name] if args.kept else use(name, args.blocks, args.position, ON_WAY)
        if args.keep:
            rows[name]["depths"] += use(name, 0, DEEP, ON_WAY)["depths"]
        print("\n".join(lines(name, rows[name])), flush=True)
        if args.keep:
            old = kept() if KEPT.exists() else {}
            KEPT.write_text(in_lines(old | rows, 3) + "\n")
    return int(any(any(exceeded(row)) for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
