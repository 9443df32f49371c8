"""What the HIP kernel's machine code issues and has on its way, stage by stage, at 4.2 TB/s and 2 us: a budget, no
measurement on AMD hardware.

    python -m tests.gfx942.hip_budget [MODEL ..] [--keep | --blocks N --position N]

A model of full width and few layers walks one token in the executor (tests/lib/gfx942/full_width.py): minutes. --keep
counts the first token and one behind DEEP others, and writes that to hip_budget.json, which --kept prints and the tests
read.
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
DEEP = 4000  # tokens before one
MOST_SLOTS = 0.6  # of those that a SIMD has while the memory brings the weights, or keys and values
SLOTS = CLOCK * 1e-6 / CYCLES  # of a SIMD in a us
COVER = 1.5  # times what the memory could bring in LATENCY
COVER_LEFT = 1.2  # times that, when a look for words is answered
Row = dict[str, Any]


def counted(name: str, num_blocks: int = 0, position: int = 0) -> Row:
    """By running it: what `kept` gives, of today's object; of so many blocks (0: the usual), behind so many tokens."""
    from tests.lib.gfx942.full_width import use

    one = use(name, num_blocks, position)
    stages = {
        stage: {
            "slots": round(seen.slots),
            "flying": seen.flying,
            "left": None if seen.left is None else round(seen.left),
            "bytes": round(one.bytes_of(stage)),
        }
        for stage, seen in one.stages.items()
    }
    facts = {"object": one.object, "blocks": one.lowering.num_blocks, "layers": one.layers}
    facts["of"] = one.spec.num_layers
    facts |= {"vgprs": one.vgprs, "spilled": one.spilled, "stages": stages}
    depth = {"position": position, "cache": round(one.cache), "walk": round(one.walk)}
    depth["layer"] = sum(facts["stages"][stage]["slots"] for stage in of_layer(facts))
    return facts | {"depths": [depth]}


def kept() -> dict[str, Row]:
    """By model: the layers that ran, of how many; by stage bytes of weights of a block and run, slots of a SIMD, bytes
    that a block has on their way at its waits, at most, and at least when a look is answered. "depths": behind so many
    tokens bytes of keys and values of a block and layer, slots of the walk of them, and of the layer."""
    made: dict[str, Row] = json.loads(KEPT.read_text())
    return made


def stage_us(row: Row, stage: str) -> float:
    """That the memory takes for a run's weights of all blocks."""
    us: float = row["stages"][stage]["bytes"] * row["blocks"] / BANDWIDTH * 1e6
    return us


def cache_us(row: Row, depth: Row) -> float:
    """That the memory takes for a layer's keys and values of all blocks."""
    us: float = depth["cache"] * row["blocks"] / BANDWIDTH * 1e6
    return us


def share_of_slots(row: Row, stage: str) -> float:
    """Of those that pass meanwhile."""
    share: float = row["stages"][stage]["slots"] / (stage_us(row, stage) * SLOTS)
    return share


def share_of_walk(row: Row, depth: Row) -> float:
    """Of those that pass while a layer's keys and values come, the walk of them."""
    share: float = depth["walk"] / (cache_us(row, depth) * SLOTS)
    return share


def share_of_layer(row: Row, depth: Row) -> float:
    """Of those that pass while a layer's weights, keys and values come, the layer."""
    us = sum(stage_us(row, name) for name in of_layer(row)) + cache_us(row, depth)
    share: float = depth["layer"] / (us * SLOTS)
    return share


def of_layer(row: Row) -> list[str]:
    return [n for n in row["stages"] if n not in ("lm_head", "choice", "between", "once a launch")]


def needed(row: Row) -> float:
    """Bytes that a block must have on their way for the bandwidth at LATENCY."""
    return BANDWIDTH * LATENCY * 1e-6 / float(row["blocks"])


def matrices(row: Row) -> list[str]:
    return [name for name, one in row["stages"].items() if one["bytes"]]


def exceeded(row: Row) -> Iterator[str]:
    """What does not suffice."""
    for name in matrices(row):
        flying = row["stages"][name]["flying"]
        if flying < COVER * needed(row):
            yield f"{name}: {flying:,} bytes on their way, {COVER * needed(row):,.0f} needed"
        if share_of_slots(row, name) > MOST_SLOTS:
            yield f"{name}: {share_of_slots(row, name):.0%} of the issue slots"
    for name, one in row["stages"].items():
        if one["left"] is not None and one["left"] < COVER_LEFT * needed(row):
            yield f"{name}: {one['left']:,} bytes left on their way when a look is answered"
    for depth in row["depths"]:
        behind, walk = f"behind {depth['position']:,} tokens", share_of_walk(row, depth)
        if depth["position"] >= DEEP and walk > MOST_SLOTS:
            yield f"the walk of keys and values {behind}: {walk:.0%} of the issue slots"
        if share_of_layer(row, depth) > MOST_SLOTS:
            yield f"a layer {behind}: {share_of_layer(row, depth):.0%} of the issue slots"


def lines(name: str, row: Row) -> Iterator[str]:
    yield (
        f"{name}: {row['blocks']} blocks, {row['layers']} of {row['of']} layers, {row['vgprs']} registers, "
        f"{row['spilled']} spilled; a block needs {needed(row):,.0f} bytes on their way"
    )
    head = f"  {'stage':<14}{'KB a block':>11}{'us':>8}{'slots':>8}{'of those there':>16}"
    yield f"{head}{'bytes on their way':>20}{'times':>7}{'left':>7}"
    for stage, one in row["stages"].items():
        cells = f"  {stage:<14}"
        if one["bytes"]:
            cells += f"{one['bytes'] / 1024:>11.1f}{stage_us(row, stage):>8.2f}{one['slots']:>8,}"
            cells += f"{share_of_slots(row, stage):>16.0%}{one['flying']:>20,}{one['flying'] / needed(row):>7.1f}"
        else:
            cells += f"{'':>19}{one['slots']:>8,}{'':>43}"
        if one["left"] is not None:
            cells += f"{one['left'] / needed(row):>7.1f}"
        yield cells
    for depth in row["depths"]:
        said = f"a layer behind {depth['position']:,} tokens: {share_of_layer(row, depth):.0%} of the issue slots"
        if depth["position"] >= DEEP:
            us, share = cache_us(row, depth), share_of_walk(row, depth)
            said += f", the walk of keys and values {share:.0%} of those of its {us:.2f} us"
        yield f"  {said}"
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
        parser.error(f"what is kept has the usual blocks, the first token and the one behind {DEEP:,}")
    from tests.lib.gfx942.full_width import CONTEXT

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
        rows[name] = kept()[name] if args.kept else counted(name, args.blocks, args.position)
        if args.keep:
            rows[name]["depths"] += counted(name, position=DEEP)["depths"]
        print("\n".join(lines(name, rows[name])), flush=True)
        if args.keep:
            old = kept() if KEPT.exists() else {}
            KEPT.write_text(in_lines(old | rows, 3) + "\n")
    return int(any(any(exceeded(row)) for row in rows.values()))


if __name__ == "__main__":
    raise SystemExit(main())
