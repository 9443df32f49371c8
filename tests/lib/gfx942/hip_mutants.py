"""Mutants of the HIP kernel's machine code: which requests run the changed instruction, and what shows the change.

    python -m tests.lib.gfx942.hip_mutants CASE --out found.json [--tries 16] [--first 0]

An instruction that no request executes has no mutant that could be caught: `unreached` names the functions that it
stands in.
"""

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kog_triton.sampling import SamplingParams
from tests.lib.gfx942 import hip_requests
from tests.lib.gfx942.executor import Fault, Memory
from tests.lib.gfx942.hip_kernel import KERNEL, HipWalk
from tests.lib.gfx942.litmus import MAPS, memory_of
from tests.lib.gfx942.mutants import Mutant, mutants
from tests.lib.gfx942.places import Chain, chains
from tests.lib.gfx942.requests import ASKED, Asked, reference_tokens
from tests.lib.gfx942.triton_cases import CASES

MORE = {
    "logprobs": Asked(SamplingParams(temperature=0.8, seed=3, logprobs=3)),
    "top-p": Asked(SamplingParams(temperature=2.5, top_p=0.6, seed=4)),
}
REQUESTS = {
    "split": ("sampled", "greedy", "edits", "rules", "long prompt", *MORE),
    "laneformer": ("greedy", "sampled", "edits", "rules"),
}
WALK = ("consume", "run_steps", "run", "run_step")  # what everything stands in
LIMIT = 6  # times the instructions that a request takes: then a run has no end
CALM = {"memory": Memory(adversarial=True)}


@dataclass(frozen=True)
class Seen:
    """What one request does in the kernel as it is."""

    tokens: list[int]
    told: np.ndarray  # of log-probabilities
    steps: int
    executed: np.ndarray
    in_flight: np.ndarray


def walk(case: str) -> HipWalk:
    return hip_requests.split_walk() if case == "split" else hip_requests.walk(case)


def asked(name: str) -> Asked:
    return MORE[name] if name in MORE else ASKED[name]


def run(one: HipWalk, name: str, conditions: dict[str, Any], seed: int) -> tuple[Any, np.ndarray]:
    """Tokens and outcome, and the records of log-probabilities."""
    what = asked(name)
    one.conditions = conditions
    one.memory.logprobs.zero_()
    made = one.generate(list(what.prompt), hip_requests.TOKENS, what.params, (), seed)
    return made, one.memory.logprobs.numpy().copy()


@cache
def seen(case: str, name: str) -> Seen:
    """AssertionError if the tokens are not the reference's."""
    one = walk(case)
    spec = hip_requests.SPLIT if case == "split" else CASES[case].spec
    tokens = reference_tokens(spec, asked(name))
    made, told = run(one, name, {"steps": hip_requests.MOST_STEPS} | CALM, 1)
    assert made == (tokens, hip_requests.FINISHED), (case, name, made, tokens)
    last = one.last
    assert last is not None
    return Seen(tokens, told, last.steps, last.executed, last.in_flight)


def reached(case: str) -> np.ndarray:
    """How often all requests together execute each instruction."""
    return np.sum([seen(case, name).executed for name in REQUESTS[case]], 0)


def unreached(case: str) -> list[Chain]:
    """Of every instruction that no request executes, the functions that it stands in."""
    places = chains(walk(case).kernel.code_object, KERNEL)
    return [places[i] for i in np.flatnonzero(reached(case) == 0)]


def idle(case: str, mutant: Mutant) -> bool:
    """Whether the mutant is a wait shortened that in no run had anything to wait for, or only what another mutant,
    without that wait, does not wait for either."""
    if " for vmcnt" not in mutant.what and " for lgkmcnt" not in mutant.what:
        return False
    wait = int(walk(case).kernel.records["offset"][mutant.index])
    most = np.max([seen(case, name).in_flight[mutant.index] for name in REQUESTS[case]], 0)
    of_vector = mutant.what.endswith("vmcnt") or "vmcnt but" in mutant.what
    beyond = (
        int(most[0]) - (wait & 15 | (wait >> 14 & 3) << 4)
        if of_vector
        else int(most[1]) - (wait >> 8 & 15)
    )
    return beyond <= int("but one" in mutant.what)


def tried(case: str) -> Iterator[Mutant]:
    """Those whose instruction some request executes."""
    counts = reached(case)
    return (m for m in mutants(walk(case).kernel) if counts[m.index])


def place(case: str, mutant: Mutant) -> str:
    """What changed and where, without what differs from compiler to compiler."""
    chain = [
        name.partition("<")[0]
        for name in chains(walk(case).kernel.code_object, KERNEL)[mutant.index]
    ]
    own = [name for name in chain if name not in WALK]
    return f"{mutant.what} in {' > '.join(own) or 'the start'}"


def wrong(case: str, mutant: Mutant, name: str, seed: int) -> str:
    """What a request shows of the mutant; "" if nothing."""
    one, right = walk(case), seen(case, name)
    memory = memory_of(seed)
    if seed % 2:
        memory = Memory(True, memory.early, 0, memory.hold, memory.quantum)  # stale lines stay
    conditions = {"memory": memory, "xcc": MAPS[seed % len(MAPS)], "steps": LIMIT * right.steps}
    kept, one.kernel = one.kernel, mutant.kernel
    try:
        made, told = run(one, name, conditions, seed)
    except (Fault, AssertionError, ValueError) as fault:
        return f"{type(fault).__name__}: {str(fault)[:120]}"
    finally:
        one.kernel = kept
    if made != (right.tokens, hip_requests.FINISHED):
        return f"tokens {made}"
    return "" if np.array_equal(told, right.told) else "log-probabilities"


def caught(case: str, mutant: Mutant, tries: int, first: int = 0) -> str:
    """What shows the mutant first, of so many runs of those requests that execute it."""
    names = [n for n in REQUESTS[case] if seen(case, n).executed[mutant.index]]
    names.sort(key=lambda n: seen(case, n).steps)
    runs = ((names[k % len(names)], k) for k in range(first, first + tries))
    return next(filter(None, (wrong(case, mutant, *one) for one in runs)), "")


def _job(job: tuple[str, int, int, int]) -> tuple[int, str]:
    case, number, tries, first = job
    return number, caught(case, _all(case)[number], tries, first)


@cache
def _all(case: str) -> list[Mutant]:
    return list(tried(case))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lib.gfx942.hip_mutants")
    parser.add_argument("case", choices=REQUESTS)
    parser.add_argument("--tries", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="of the seeds")
    parser.add_argument(
        "--out", type=Path, required=True, help="what was found; goes on with what it holds"
    )
    args = parser.parse_args()
    made = _all(args.case)
    found: dict[str, str] = json.loads(args.out.read_text()) if args.out.exists() else {}
    left = [n for n, m in enumerate(made) if not idle(args.case, m)]
    total, left = len(left), [n for n in left if not found.get(str(n))]
    if args.first == 0:
        left = [n for n in left if str(n) not in found]
    left.sort(
        key=lambda n: n * 7919 % 1009
    )  # what is found of some is like what would be found of all
    print(
        f"{args.case}: {len(made)} reached, {total} can differ, {len(left)} to be tried", flush=True
    )
    with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
        jobs = ((args.case, n, args.tries, args.first) for n in left)
        for done, (number, what) in enumerate(pool.imap_unordered(_job, jobs), 1):
            found[str(number)] = what
            if done % 20 == 0 or done == len(left):
                args.out.write_text(json.dumps(found, indent=1))
                survive = [place(args.case, made[int(n)]) for n, why in found.items() if not why]
                print(len(found), len(survive), Counter(survive).most_common(3), flush=True)


if __name__ == "__main__":
    main()
