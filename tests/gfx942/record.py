"""Run everything on the executor with many seeds, and write down what was run and of which code objects.

    TRITON_INTERPRET=1 python -m tests.gfx942.record [--seeds 16] [--litmus 1000] [--only accesses]

record.json.xz says of the Triton and the HIP kernel's objects (these are clang-19's) and of the litmus kernels:
SHA-256, compiler, seeds, and what went wrong: nothing, or this command fails. Of the objects of full size, which are
not run, what each access touches; of KCCL's collectives which mutants were caught.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.gfx942 import budget
from tests.lib import kept_rows
from tests.lib.gfx942 import differential, hip_collectives, hip_column_requests, hip_lives, hip_ranks, hip_requests
from tests.lib.gfx942.backends import COMPILERS
from tests.lib.gfx942.executor import PLAIN, Kernel
from tests.lib.gfx942.hip_columns import HipColumns
from tests.lib.gfx942.hip_kernel import HipWalk
from tests.lib.gfx942.litmus import ARGUED, LITMUS, map_of, memory_of, plain_of, run
from tests.lib.gfx942.mutants import caught, mutants
from tests.lib.gfx942.requests import ASKED, LIVES, expected, run_request
from tests.lib.gfx942.scopes import accesses_of, counted, wrong
from tests.lib.gfx942.triton_backend import Conditions
from tests.lib.gfx942.triton_cases import CASES, FULL_OBJECTS, FULL_SIZE, MORE_SIZES, compiled
from tests.lib.kccl_runs import COLLECTIVES

RECORD = Path(__file__).parent / "record.json.xz"
PARTS = ("arithmetic", "requests", "hip", "columns", "ranks", "litmus", "accesses", "kccl")
Row = dict[str, Any]


def runs_of(seeds: int, right: Callable[[Conditions], bool]) -> Row:
    """So many seeds in each memory: those of which a run under these conditions was not right."""
    wrong = {
        key: [seed for seed in range(seeds) if not right(Conditions(memory(seed), seed, map_of(seed)))]
        for key, memory in (("wrong", memory_of), ("wrong in plain memory", plain_of))
    }
    print(wrong, flush=True)
    return {"seeds": seeds} | wrong


def arithmetic(seeds: int) -> list[Row]:
    """Seeds of inputs for which the executor and x86 differ."""
    wrong = [seed for seed in range(seeds) if differential.wrong(differential.inputs(seed))]
    print("arithmetic wrong:", wrong, flush=True)
    return [{"what": "against x86", "seeds": seeds, "wrong": wrong}]


def asked() -> Iterator[tuple[str, str, str, Callable[[Conditions], bool]]]:
    """Case, request, variant of the kernel, and whether a run under these conditions is right."""
    for case in CASES:
        for name, one in ASKED.items():

            def right(c: Conditions, case: str = case, name: str = name) -> bool:
                return run_request(case, c, name) == expected(case, name)

            yield case, name, one.variant, right
        for name, life in LIVES.items():

            def lived(c: Conditions, case: str = case, life: Callable = life) -> bool:
                return life(case, c)

            yield case, name, "rules" if "yields" in name else "", lived


def requests(seeds: int) -> list[Row]:
    """Whole requests of every case against the reference."""
    rows = []
    for case, name, variant, right in asked():
        made = compiled(case, variant)
        print(case, name, flush=True)
        row = {"case": case, "request": name, "object": made.code_object.sha256, "compiler": f"triton {made.triton}"}
        rows.append(row | runs_of(seeds, right))
    return rows


def hip(seeds: int) -> list[Row]:
    """Whole requests of the HIP kernel against the reference."""
    asked = hip_requests.asked()
    rows = [hip_row(case, name, one, tokens(), seeds) for case, name, one, tokens in asked]
    one = hip_requests.walk(hip_lives.CASE)
    return rows + [hip_found(hip_lives.CASE, name, one, seeds, well) for name, well in hip_lives.LIVES.items()]


def ranks(seeds: int) -> list[Row]:
    """Rows of whole requests by the HIP kernel on two simulated GPUs, `seeds` runs each (hip_ranks.py)."""
    asked = hip_ranks.asked()
    return [hip_row(case, name, hip_ranks.walk(case), tokens, seeds) for case, name, tokens in asked]


def hip_row(case: str, name: str, one: HipWalk, tokens: list[int], seeds: int) -> Row:
    def right(c: Conditions) -> bool:
        return not hip_requests.wrong(one, name, tokens, hip_conditions(c), c.seed)

    return hip_found(case, name, one, seeds, right)


def hip_found(case: str, name: str, one: HipWalk, seeds: int, right: Callable[[Conditions], bool]) -> Row:
    print("hip", case, name, flush=True)
    return {"case": case, "request": name, "object": one.kernel.code_object.sha256} | runs_of(seeds, right)


def hip_conditions(c: Conditions) -> dict[str, Any]:
    return {"memory": c.memory, "xcc": c.xcc}


def shared() -> Iterator[tuple[str, Callable[[], HipColumns], Callable[[Conditions], bool]]]:
    """Cases of the HIP kernel of columns: each its kernel's model and whether a run under these conditions is right."""
    for case in hip_column_requests.SHARED:

        def right(c: Conditions, case: str = case) -> bool:
            return not hip_column_requests.wrong(case, hip_conditions(c), c.seed)

        yield case, partial(hip_column_requests.columns, case), right
    for gpus, where in ((1, ""), (2, " on two GPUs")):

        def right_prompt(c: Conditions, gpus: int = gpus) -> bool:
            return not hip_column_requests.wrong_prompt(hip_conditions(c), c.seed, gpus=gpus)

        yield f"a prompt in chunks{where}", partial(hip_column_requests.chunks, gpus), right_prompt


def columns(seeds: int) -> list[Row]:
    """Whole requests beside each other, a column each, against the reference."""
    rows = []
    for case, one, right in shared():
        print("columns", case, flush=True)
        row = {"case": case, "object": one().kernel.code_object.sha256}
        rows.append(row | runs_of(seeds, right))
    return rows


def litmus(seeds: int) -> list[Row]:
    """The exchanges, right in every seed of both memories; their mutants, by how many were caught."""
    return [litmus_row(compiler, name, seeds) for compiler in COMPILERS for name in LITMUS]


def litmus_row(compiler: str, name: str, seeds: int) -> Row:
    source = COMPILERS[compiler]("litmus.hip")
    kernel = Kernel(source, name)
    wrong = [seed for seed in range(seeds) if run(kernel, seed)[0]]
    plainly = [seed for seed in range(seeds) if run(kernel, seed, PLAIN)[0]]
    made = list(mutants(kernel))
    left = {m.named() for m in made if not caught(m.kernel, lambda k, seed: run(k, seed)[0])}
    print(compiler, name, "wrong:", wrong, plainly, "survive:", sorted(left), flush=True)
    row = {"kernel": name, "object": source.sha256, "compiler": compiler, "seeds": seeds}
    row |= {"wrong": wrong, "wrong in plain memory": plainly, "mutants": len(made)}
    return row | {"survive": {one: "argued" * (one in ARGUED[name]) for one in sorted(left)}}


def kccl() -> list[Row]:
    """Each collective by each policy on two GPUs: its mutants, and why those live that no run tells (`lives`)."""
    return [kccl_row(policy, what) for policy in hip_collectives.POLICY for what in COLLECTIVES]


def kccl_row(policy: str, what: str) -> Row:
    kernel = Kernel(hip_collectives.compiled(policy, 2), what)
    made = hip_collectives.of_kccl(kernel, policy)
    why = [(f"{one.named()} at {one.at:#x}", hip_collectives.lives(one, policy)) for one in made]
    left = {name: reason for name, reason in sorted(why) if reason != "caught"}
    print(policy, what, len(why), "survive:", left, flush=True)
    row = {"case": policy, "kernel": what, "object": kernel.code_object.sha256, "mutants": len(why)}
    return row | {"caught": sum(reason == "caught" for _, reason in why), "survive": left}


def walked() -> list[Row]:
    """The accesses of every object of full size by the walk over its code: how many of a class, and which are wrong."""
    rows = []
    for case, variant in FULL_OBJECTS:
        made = compiled(case, variant)
        found = accesses_of(made.code_object)
        row = {"case": case, "variant": variant, "object": made.code_object.sha256}
        row |= {"compiler": f"triton {made.triton}", "accesses": counted(found), "wrong": wrong(found)}
        rows.append(row)
        print(case, variant, "wrong accesses:", row["wrong"], flush=True)
    return rows


def failures(record: dict[str, Any]) -> list[str]:
    """What the record tells of that must not be."""
    names = ("case", "variant", "request", "compiler", "kernel")
    return [
        f"{' '.join(row[k] for k in names if row.get(k))}: {key} {row[key]}"
        for part in PARTS
        for row in record[part]
        for key in ("wrong", "wrong in plain memory")
        if row.get(key)
    ] + [
        f"{row.get('compiler', row.get('case'))} {row['kernel']}: {one}"
        for row in (*record["litmus"], *record["kccl"])
        for one, why in row["survive"].items()
        if not why
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gfx942.record", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=16, help="of inputs; of whole requests as many in each memory")
    parser.add_argument("--litmus", type=int, default=1000, help="of litmus kernels")
    parser.add_argument("--only", choices=PARTS, help="run this part, and keep the others of the last record")
    args = parser.parse_args(argv)
    if budget.main([*FULL_SIZE, *MORE_SIZES]):  # first, what does not fit
        return 1
    runs: dict[str, Callable[[], list[Row]]] = {
        "arithmetic": lambda: arithmetic(args.seeds),
        "requests": lambda: requests(args.seeds),
        "hip": lambda: hip(args.seeds),
        "columns": lambda: columns(args.seeds),
        "ranks": lambda: ranks(args.seeds),
        "litmus": lambda: litmus(args.litmus),
        "accesses": walked,
        "kccl": kccl,
    }
    record: dict[str, Any] = kept_rows.read(RECORD) if args.only else {}
    record |= {
        "what": "executed on a CPU, instruction by instruction, in plain and adversarial memory; not on AMD hardware",
        "tinygrad": version("tinygrad"),
    }
    record |= {part: run() for part, run in runs.items() if args.only in (None, part)}
    kept_rows.write(RECORD, record)
    for failure in failures(record):
        print("WRONG", failure)
    return 1 if failures(record) else 0


if __name__ == "__main__":
    raise SystemExit(main())
