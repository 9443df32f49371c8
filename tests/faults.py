"""Planted faults: each must turn its test file red. Run by hand:

    python tests/faults.py              all of them; --list prints them
    python tests/faults.py --quick      one in each floor of the house, as .ci/run does
    python tests/faults.py RoPE top-p   those whose sentence has one of these words in it
    python tests/faults.py --draw 7 40  forty others, drawn at random by seed 7 (planted/draw.py): the share caught

A gate that nobody has seen red is not known to work. Faults are planted in copies of the tree, one
at a time; first every test file that they name must be green in a copy without a fault. With --quick, beside which
.ci/run runs all tests, only those that went red must be, when the faults are out again. Exit code 0
if all are caught, 1 if not, 2 if the command line is wrong.
"""

import argparse
import difflib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # as a program it finds its own tables

from tests.planted import (  # noqa: E402
    checkpoint,
    commands,
    conversations,
    draw,
    edges,
    engine,
    first_use,
    hip,
    model,
    ranks,
    reports,
    schedule,
    second_sample,
    server,
    short_prompts,
    third_sample,
)
from tests.planted.fault import Drawn, Fault  # noqa: E402

WORKERS = 2


FAULTS = (
    *model.FAULTS,
    *checkpoint.FAULTS,
    *schedule.FAULTS,
    *ranks.FAULTS,
    *hip.FAULTS,
    *engine.FAULTS,
    *commands.FAULTS,
    *first_use.FAULTS,
    *edges.FAULTS,
    *reports.FAULTS,
    *server.FAULTS,
    *conversations.FAULTS,
    *short_prompts.FAULTS,
    *second_sample.FAULTS,
    *third_sample.FAULTS,
)


def place(fault: Fault) -> Path:
    """Where a fault's file lies in a tree: `backends/cuda` is the package kog_triton.backends.cuda."""
    path = Path(fault.path)
    return path if path.parts[:2] == ("backends", "cuda") else "kog_triton" / path


def plant(fault: Fault, tree: Path) -> bool:
    """Whether the fault's tests went red in this copy of the tree, which is left as it was."""
    file = tree / place(fault)
    return red(file, file.read_text().replace(fault.before, fault.after, 1), [fault.tests], tree)


def red(file: Path, changed: str, tests: Sequence[str], tree: Path) -> bool:
    """Whether test files go red while a file of this copy of the tree is changed."""
    source = file.read_text()
    file.write_text(changed)
    try:
        return any(not green([one], tree, collected=False) for one in tests)
    finally:
        file.write_text(source)


def green(tests: Sequence[str], tree: Path, *options: str, collected: bool = True) -> bool:
    """Whether test files pass in a copy of the tree. A run that hangs is red."""
    argv = [sys.executable, "-m", "pytest", "-qx", *options]
    # Bytecode is off: a fault and its repair may fall into the same second.
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
    env |= {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*argv, *(f"tests/{t}" for t in tests)], cwd=tree, env=env, capture_output=True, timeout=300
        )
    except subprocess.TimeoutExpired:
        return False
    if collected and done.returncode not in (0, 1):  # no fault is planted, and it is not even collected
        raise SystemExit(f"pytest ended with {done.returncode}: {done.stdout.decode()[-2000:]}")
    return done.returncode == 0


def asked(argv: list[str]) -> tuple[Fault, ...]:
    """Those that a command line asks for; it exits where that is none."""
    parser = argparse.ArgumentParser("tests/faults.py", description="Plant faults, see tests red.")
    parser.add_argument("--list", action="store_true", help="print the faults and plant none")
    parser.add_argument("--quick", action="store_true", help="those of .ci/run alone")
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of a fault's sentence")
    args = parser.parse_args(argv)
    for word in args.words:
        if not any(word in f.what for f in FAULTS):
            parser.error(f"{word!r} stands in no fault's sentence: --list prints them")
    wanted = args.words or [""]
    faults = tuple(f for f in FAULTS if f.quick >= args.quick and any(word in f.what for word in wanted))
    if not faults:
        parser.error(f"none of the quick faults has {' or '.join(map(repr, wanted))} in it")
    if args.list:
        print(*(f"{f.tests:34}{f.what}" for f in faults), sep="\n")
        parser.exit()
    return faults


def main(argv: list[str]) -> int:
    if "--draw" in argv:
        return try_drawn(*drawing(argv))
    faults = asked(argv)
    for fault in faults:
        count = (ROOT / place(fault)).read_text().count(fault.before)
        if count != 1:
            sys.exit(f"{fault.path} has {count} places for {fault.what!r}: plant it anew")
    cases = [(fault.what, (fault.tests,), partial(plant, fault)) for fault in faults]
    caught = tried(cases, WORKERS, "--quick" in argv)
    print(f"{caught} of {len(faults)} faults caught")
    return caught < len(faults)


def drawing(argv: list[str]) -> tuple[int, int]:
    """Seed and count of --draw, which takes nothing else."""
    parser = argparse.ArgumentParser("tests/faults.py --draw", description="Plant faults drawn.")
    parser.add_argument("--draw", nargs=2, type=int, metavar=("SEED", "COUNT"), required=True)
    args = parser.parse_args(argv)
    seed, count = args.draw
    if count < 1:
        parser.error(f"COUNT is {count}, and a draw has at least one fault")
    return seed, count


def try_drawn(seed: int, count: int) -> int:
    """Print what is caught and missed of a draw, and the share; 0."""
    drawn = draw.draw(ROOT / "kog_triton", seed, count)
    cases = [
        (
            described(one),
            one.tests,
            lambda tree, one=one: red(tree / "kog_triton" / one.path, one.changed, one.tests, tree),
        )
        for one in drawn
    ]
    caught = tried(cases, len(os.sched_getaffinity(0)))
    print(f"{caught} of {len(drawn)} caught, {caught / len(drawn):.0%}, seed {seed}")
    return 0


def described(one: Drawn) -> str:
    """A drawn fault: its place, and the lines that it changes, in one line of text."""
    old = (ROOT / "kog_triton" / one.path).read_text().splitlines()
    lines = [*difflib.unified_diff(old, one.changed.splitlines(), lineterm="", n=0)][3:]
    before, after = (" ".join(x[1:].strip() for x in lines if x.startswith(sign)) for sign in ("-", "+"))
    return f"{one.path}:{one.line}  {before}  ->  {after}"


Case = tuple[str, Sequence[str], Callable[[Path], bool]]  # its sentence, its tests, how it is tried in a tree


def tried(cases: Sequence[Case], workers: int, quick: bool = False) -> int:
    """How many turned their tests red, each printed as it ends. All tests must be green without a fault."""
    red_without = "the tests are red without a fault"
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for i in range(workers):
            tree = Path(folder) / f"tree{i}"
            skip = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
            shutil.copytree(ROOT, tree, ignore=skip, symlinks=True)
            trees.put(tree)
        tests = sorted({one for _, files, _ in cases for one in files})
        shares = [share for i in range(workers) if (share := tests[i::workers])]
        folders = [Path(folder) / f"tree{i}" for i in range(len(shares))]
        if not quick and not all(pool.map(green, shares, folders)):
            sys.exit(red_without)

        def run(case: Case) -> bool:
            what, _, try_it = case
            tree = trees.get()
            noticed = try_it(tree)
            trees.put(tree)
            print(f"{'caught' if noticed else 'MISSED':8}{what}", flush=True)
            return noticed

        caught = sum(pool.map(run, cases))
        again = partial(green, tests)
        if quick and not all(pool.map(again, folders, ["--last-failed"] * workers)):
            sys.exit(red_without)
        return caught


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
