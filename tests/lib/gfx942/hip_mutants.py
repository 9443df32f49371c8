"""Mutants of the HIP kernel's machine code: which requests run the changed instruction, and what shows the change.

    python -m tests.lib.gfx942.hip_mutants CASE --record found.json [--seeds 16] [--only WORDS] [--minutes 30]

tries every one that can differ, whose place (`place`) has the words, by as many runs; stops after so many minutes, and
goes on from the record when it is called again, with more seeds for those that survive. A record is of one object.

An instruction that no request executes has no mutant that could be caught: `unreached` names the functions that it
stands in.
"""

import argparse
import json
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kog_triton.model.spec import ModelSpec
from kog_triton.sampling import SamplingParams
from tests.lib.compiled import Arrays, from_own_end, made_in_run
from tests.lib.gfx942 import hip_column_requests, hip_ranks, hip_requests
from tests.lib.gfx942.argued import ARGUED
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.executor import Fault, Memory
from tests.lib.gfx942.hip_columns import HipColumns
from tests.lib.gfx942.hip_kernel import HipWalk
from tests.lib.gfx942.hip_ranks import HipRankWalk
from tests.lib.gfx942.litmus import MAPS, map_of, memory_of
from tests.lib.gfx942.mutants import Mutant, mutants
from tests.lib.gfx942.places import Chain, chains
from tests.lib.gfx942.requests import ASKED, LONG, Asked, reference_tokens
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.gfx942.waits import kept_by, touched_early
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.triton_cases import plain

MORE = {
    "logprobs": Asked(SamplingParams(temperature=0.8, seed=3, logprobs=3)),
    "top-p": Asked(SamplingParams(temperature=2.5, top_p=0.6, seed=4)),
    "cut, logprobs": Asked(SamplingParams(temperature=2.5, top_p=0.6, seed=4, logprobs=3)),
    # To positions from which a row of the cache passes from one block's split to another's, which has read beside it.
    "long, top-p": Asked(SamplingParams(temperature=2.5, top_p=0.6, seed=4), LONG[:18]),
    "long, greedy": Asked(SamplingParams(temperature=0.0), LONG[:18]),
    "eight": Asked(SamplingParams(temperature=0.0), LONG[:8]),
    "mild top-p": Asked(SamplingParams(temperature=1.2, top_p=0.6, seed=7)),
    "long, mild top-p": Asked(SamplingParams(temperature=1.2, top_p=0.6, seed=7), LONG[:18]),
}
MORE_OF_SPLIT = ("logprobs", "top-p", "cut, logprobs", "long, top-p")
# A block's ids are of many warps: what one finishes, counts, biases or bans is another's. Elsewhere all are of one.
WIDE = plain(1, vocab_size=1600)
WIDE_PROMPT = (70, 463, 1312, 299)
WIDE_ASKED = {
    "wide": Asked(SamplingParams(temperature=0.8, seed=3, logprobs=3), WIDE_PROMPT),
    "wide edits": Asked(
        SamplingParams(
            temperature=0.5,
            seed=26,
            repetition_penalty=1.9,
            frequency_penalty=1.5,
            logit_bias=dict.fromkeys(range(24, 1600, 20), 6.0),
            allowed_token_ids=tuple(range(3, 1590)),
            min_tokens=6,
            end_token_ids=(164, 564, 1564),  # the last is biased by another wave than bans it
        ),
        WIDE_PROMPT,
    ),
    "wide top-p": Asked(SamplingParams(temperature=2.5, top_p=0.6, seed=5), WIDE_PROMPT),
    "wide top-k": Asked(SamplingParams(temperature=2.5, top_k=20, seed=5), WIDE_PROMPT),
}
# What blocks say of their places, and of a token, is gathered by one wave where there are up to 64.
MANY = plain(1, vocab_size=300, hidden_size=640, intermediate_size=64, num_heads=4, head_dim=8)
MANY_BLOCKS = 80
MANY_ASKED = {"many": Asked(SamplingParams(temperature=2.5, top_p=0.6, seed=3), (70,))}
REQUESTS = {
    "split": ("sampled", "greedy", "edits", "rules", "long prompt", *MORE_OF_SPLIT),
    "wide": tuple(WIDE_ASKED),
    "many": tuple(MANY_ASKED),
    "heads": ("long, greedy",),
    "tails": ("greedy", "sampled"),
    "laneformer": ("greedy", "sampled", "edits", "rules"),
    "ranks": ("greedy", "sampled"),  # of two GPUs
    # Of a kernel of two columns, beside each other: as long as each other, so that one launch runs both.
    "columns": ("greedy + rules", "edits + sampled", "mild top-p + logprobs", "long, mild top-p + long, greedy"),
    "columns of waves": ("wide + wide edits", "wide edits + wide", "wide top-p + wide top-k"),
    # The third has the first's slot behind it, beside the second, whose context all blocks share, and ends with that.
    "columns of heads": ("eight + long, greedy + greedy", "eight + long, greedy + edits"),
    "columns of ranks": ("greedy + sampled + rules + edits", "edits + rules + sampled + greedy"),  # of two GPUs
    "chunk": ("long prompt",),  # four positions of a prompt a step, and its first token
    "bfloat16": ("greedy", "edits"),
    "columns of bfloat16": ("greedy + edits",),
}
# The specs, of hip_column_requests.py.
COLUMNS = {
    "columns": "windows",
    "columns of waves": "waves",
    "columns of heads": "heads",
    "columns of ranks": "llama on two GPUs",
    "columns of bfloat16": "qwen3",
}
NAMES = {"bfloat16": "qwen3"}  # of hip_requests' cases
# What a wave keeps for itself in shared memory: its ring and its state; and since when it waits.
OWN = {"save_ring", "save_state", "begin_wait", "end_wait"}
WALK = ("consume", "run_steps", "run", "run_step", "run_step_between")  # what everything stands in
# Times the instructions that a request takes: then a run has no end. Waves that are held back have others poll: of
# 'heads' 6.1 times as many in one run of 64.
LIMIT = 8
CALM = {"memory": Memory(adversarial=True)}


@dataclass(frozen=True)
class Seen:
    """What one request does in the kernel as it is."""

    made: Any  # tokens and outcome, of each column
    told: np.ndarray  # log-probabilities; of a chunk, the cache
    steps: int
    executed: np.ndarray
    in_flight: np.ndarray


def walk(case: str) -> HipWalk | HipColumns:
    if case == "chunk":
        return hip_column_requests.chunks()
    if case in COLUMNS:
        return hip_column_requests.columns(COLUMNS[case])
    if case == "ranks":
        return hip_ranks.walk("llama")
    if case == "wide":
        return _wide_walk()
    if case == "many":
        return _many_walk()
    if case == "heads":
        return hip_requests.heads_walk()
    if case == "tails":
        return hip_requests.tails_walk()
    return hip_requests.split_walk() if case == "split" else hip_requests.walk(NAMES.get(case, case))


@cache
def _wide_walk() -> HipWalk:
    return HipWalk(WIDE, ArrayWeights(WIDE), 8)


@cache
def _many_walk() -> HipWalk:
    return HipWalk(MANY, ArrayWeights(MANY), MANY_BLOCKS)


def _spec(case: str) -> ModelSpec:
    if case == "chunk":
        return hip_column_requests.spec_of("llama")
    if case in COLUMNS:
        return hip_column_requests.spec_of(COLUMNS[case])
    own = {
        "split": hip_requests.SPLIT,
        "ranks": hip_ranks.SPECS["llama"],
        "wide": WIDE,
        "many": MANY,
        "heads": hip_requests.HEADS,
        "tails": hip_requests.TAILS,
    }
    return own[case] if case in own else CASES[NAMES.get(case, case)].spec


def asked(name: str) -> Asked:
    return (ASKED | MORE | WIDE_ASKED | MANY_ASKED)[name]


def run(one: HipWalk | HipColumns, name: str, conditions: dict[str, Any], seed: int) -> tuple[Any, np.ndarray]:
    """Tokens and outcome, and what was told beside them (`Seen`)."""
    one.memory.logprobs.zero_()
    for memory in one.ranks if isinstance(one, HipRankWalk) else [one.memory]:
        # a row that is read too early would be the last run's, the same
        memory.cache.fill_(torch.nan)
    what = [asked(each) for each in name.split(" + ")]
    if one.layout.chunk:
        made: Any = one.prompt(what[0].request(), seed, **conditions)
    elif isinstance(one, HipColumns):
        slots = [number % one.layout.columns for number in range(len(what))]
        requests = [each.request(slot, hip_requests.TOKENS) for slot, each in zip(slots, what, strict=True)]
        made = one.serve(requests, seed, **conditions)
    else:
        one.conditions = conditions
        prompt, params = list(what[0].prompt), what[0].params
        made = one.generate(prompt, hip_requests.TOKENS, params, (), seed)
    told = one.memory.cache.view(torch.int16) if one.layout.chunk else one.memory.logprobs
    return made, told.numpy().copy()


def expected(case: str, name: str) -> Any:
    """What the reference's tokens are, each with the outcome of a request that runs to its length."""
    each = [reference_tokens(_spec(case), asked(one)) for one in name.split(" + ")]
    if case == "chunk":
        return each[0][:1]
    made = [(tokens, hip_requests.FINISHED) for tokens in each]
    return made if case in COLUMNS else made[0]


@cache
def seen(case: str, name: str) -> Seen:
    """AssertionError if the tokens are not the reference's."""
    arrays = made_in_run(f"seen {case} {name}", partial(_see, case, name))
    told, steps, executed, in_flight = (arrays[k] for k in ("told", "steps", "executed", "in_flight"))
    return Seen(expected(case, name), told, int(steps), executed, in_flight)


def _see(case: str, name: str) -> Arrays:
    one, right = walk(case), expected(case, name)
    steps = hip_requests.most_steps(one.layout.lowering.num_blocks)
    made, told = run(one, name, {"steps": steps} | CALM, 1)
    assert made == right, (case, name, made, right)
    last = one.last
    assert last is not None
    return {"told": told, "steps": np.array(last.steps), "executed": last.executed, "in_flight": last.in_flight}


def reached(case: str) -> np.ndarray:
    """How often all requests together execute each instruction."""
    return np.sum([seen(case, name).executed for name in from_own_end(REQUESTS[case])], 0)


def unreached(case: str) -> list[Chain]:
    """Of every instruction that no request executes, the functions that it stands in."""
    kernel = walk(case).kernel
    places = chains(kernel.code_object, kernel.name)
    return [places[i] for i in np.flatnonzero(reached(case) == 0)]


def idle(case: str, mutant: Mutant) -> bool:
    """Whether the mutant is a wait shortened that had nothing to wait for in the one calm run of each request, or only
    what another mutant, without that wait, does not wait for either."""
    if " for vmcnt" not in mutant.what and " for lgkmcnt" not in mutant.what:
        return False
    wait = int(walk(case).kernel.records["offset"][mutant.index])
    most = np.max([seen(case, name).in_flight[mutant.index] for name in REQUESTS[case]], 0)
    of_vector = mutant.what.endswith("vmcnt") or "vmcnt but" in mutant.what
    beyond = int(most[0]) - (wait & 15 | (wait >> 14 & 3) << 4) if of_vector else int(most[1]) - (wait >> 8 & 15)
    return beyond <= int("but one" in mutant.what)


def needed(mutant: Mutant) -> list[str]:
    """What a mutant without a wait, or with a shorter one, touches too early on any way through its code (waits.py)."""
    kernel, change = mutant.original, mutant.kernel.records
    made, code = kernel.code_object, kernel.code_object.code(kernel.name)[1]
    patched = bytearray(code)
    for k in mutant.changed:
        at = int(change["at"][k])
        patched[at : at + 2] = int(change["offset"][k]).to_bytes(2, "little")
    assert made.blob.count(code) == 1
    return touched_early(CodeObject(made.blob.replace(code, bytes(patched))), kernel.name)


def kept(mutant: Mutant) -> dict[str, set[int]]:
    """The places of what such a mutant leaves unfinished where waves meet, on any way, and which instructions those
    are; but for what only its own wave looks at."""
    kernel, change = mutant.original, mutant.kernel.records
    waits = {int(change["at"][k]): int(change["offset"][k]) for k in mutant.changed}
    index = {int(at): k for k, at in enumerate(kernel.records["at"])}
    places = chains(kernel.code_object, kernel.name)
    found: dict[str, set[int]] = {}
    for op, at in kept_by(kernel.code_object, kernel.name, waits):
        chain = [name.partition("<")[0] for name in places[index[op]]]
        if OWN.isdisjoint(chain):
            found.setdefault(" > ".join(chain), set()).add(index[at])
    return found


def explained(case: str, mutant: Mutant) -> str:
    """Why no run tells the mutant: as was argued, since other ways through the code need the wait, or since none does;
    else ""."""
    argued = ARGUED.get(case, {})
    why = argued.get(place(case, mutant)) or argued.get(numbered(case, mutant), "")
    return why or why_of_wait(mutant)


def why_of_wait(mutant: Mutant) -> str:
    """Of a wait, whether other ways through the code need it, or none does; else ""."""
    if " wait for " not in mutant.what:
        return ""
    if ways := needed(mutant):
        return f"other ways need it: {ways[0]}"
    return "" if kept(mutant) else "no way needs it"


def tried(case: str) -> Iterator[Mutant]:
    """Those whose instruction some request executes."""
    counts = reached(case)
    return (m for m in mutants(walk(case).kernel) if counts[m.index])


def place(case: str, mutant: Mutant) -> str:
    """What changed and where, without what differs from compiler to compiler."""
    kernel = walk(case).kernel
    chain = [name.partition("<")[0] for name in chains(kernel.code_object, kernel.name)[mutant.index]]
    own = [name for name in chain if name not in WALK]
    return f"{mutant.what} in {' > '.join(own) or 'the start'}"


@cache
def _numbered(case: str) -> dict[tuple[int, str], str]:
    of_place: dict[str, list[Mutant]] = {}
    for mutant in _all(case):
        of_place.setdefault(place(case, mutant), []).append(mutant)
    return {
        (one.index, one.what): f"{where} #{k + 1} of {len(found)}" if len(found) > 1 else where
        for where, found in of_place.items()
        for k, one in enumerate(found)
    }


def numbered(case: str, mutant: Mutant) -> str:
    """Its place, and which of several that are there it is, in the order of the code: "... #2 of 3"."""
    return _numbered(case)[mutant.index, mutant.what]


def wrong(case: str, mutant: Mutant | None, name: str, seed: int) -> str:
    """What a request shows of the mutant, or of the kernel as it is; "" if nothing."""
    one, right = walk(case), seen(case, name)
    memory = memory_of(seed)
    if (seed + seed // 4) % 2:  # half of the runs on each map and by each quantum
        memory = Memory(True, memory.early, 0, memory.hold, memory.quantum)  # stale lines stay
    conditions = {"memory": memory, "xcc": map_of(seed), "steps": LIMIT * right.steps}
    kept = one.kernel
    if mutant is not None:
        one.kernel = mutant.kernel
    try:
        made, told = run(one, name, conditions, seed)
    except (Fault, AssertionError, ValueError) as fault:
        return f"{type(fault).__name__}: {str(fault)[:120]}"
    finally:
        one.kernel = kept
    if made != right.made:
        return f"tokens {made}"
    return "" if np.array_equal(told, right.told) else "what was told beside them"


@cache
def stands(case: str, name: str, seed: int) -> bool:
    """Whether the kernel as it is gets through the run by which a mutant is judged."""
    return not wrong(case, None, name, seed)


def caught(case: str, mutant: Mutant, tries: int, first: int = 0) -> str:
    """What shows the mutant first, of so many runs of those requests that execute it. AssertionError if the kernel goes
    wrong there, too."""
    names = [n for n in REQUESTS[case] if seen(case, n).executed[mutant.index]]
    names.sort(key=lambda n: seen(case, n).steps)
    # of up to four each on every map
    runs = ((names[(k + k // len(MAPS)) % len(names)], k) for k in range(first, first + tries))
    for name, seed in runs:
        if what := wrong(case, mutant, name, seed):
            assert stands(case, name, seed), (case, name, seed)
            return what
    return ""


def _job(job: tuple[str, int, int, int]) -> tuple[int, str]:
    case, number, tries, first = job
    return number, caught(case, _all(case)[number], tries, first)


@cache
def _all(case: str) -> list[Mutant]:
    return list(tried(case))


@dataclass
class Record:
    """What was found of a case's mutants, by their numbers: `seeds` that were tried of each, `caught` by what or ""."""

    path: Path
    case: str
    found: dict[str, dict[str, Any]]

    @classmethod
    def open(cls, path: Path, case: str) -> "Record":
        """ValueError for a record of another object, whose mutants are others."""
        if not path.exists():
            return cls(path, case, {})
        kept = json.loads(path.read_text())
        if (kept["case"], kept["object"]) != (case, cls.object_of(case)):
            raise ValueError(f"{path} is of {kept['case']}, object {kept['object'][:12]}: not this one")
        return cls(path, case, kept["mutants"])

    @staticmethod
    def object_of(case: str) -> str:
        return walk(case).kernel.code_object.sha256

    def left(self, numbers: list[int], seeds: int) -> list[tuple[int, int]]:
        """Which of these mutants are still to be tried, from which seed on."""
        kept = [(n, self.found.get(str(n), {"seeds": 0, "caught": ""})) for n in numbers]
        return [(n, one["seeds"]) for n, one in kept if not one["caught"] and one["seeds"] < seeds]

    def note(self, number: int, seeds: int, what: str) -> None:
        place_of = place(self.case, _all(self.case)[number])
        self.found[str(number)] = {"place": place_of, "seeds": seeds, "caught": what}

    def write(self) -> None:
        """By a file beside it: what is interrupted leaves the last one."""
        kept = {"case": self.case, "object": self.object_of(self.case), "mutants": self.found}
        beside = self.path.with_suffix(".new")
        beside.write_text(json.dumps(kept, indent=1))
        beside.replace(self.path)

    def survivors(self) -> Counter[tuple[str, str]]:
        """Places and why no run tells the mutant, or ""."""
        left = [int(number) for number, one in self.found.items() if not one["caught"]]
        made = _all(self.case)
        return Counter((place(self.case, made[n]), explained(self.case, made[n])) for n in left)


def try_all(record: Record, seeds: int, only: str, minutes: float, jobs: int) -> int:
    """How many mutants are left to be tried."""
    case, made = record.case, _all(record.case)
    can_differ = [n for n, m in enumerate(made) if only in place(case, m) and not idle(case, m)]
    left = record.left(can_differ, seeds)
    # what is found of some is like what would be found of all
    left.sort(key=lambda one: one[0] * 7919 % 1009)
    print(f"{case}: {len(made)} reached, {len(can_differ)} can differ, {len(left)} to be tried", flush=True)
    end = time.monotonic() + 60 * minutes
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        work = ((case, n, seeds - first, first) for n, first in left)
        done = 0
        for number, what in pool.imap_unordered(_job, work):
            record.note(number, seeds, what)
            done += 1
            over = time.monotonic() > end
            if done % 10 == 0 or done == len(left) or over:
                record.write()
            if over:
                break
    return len(left) - done


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.lib.gfx942.hip_mutants")
    parser.add_argument("case", choices=REQUESTS)
    parser.add_argument("--record", type=Path, required=True, help="kept here, and gone on with")
    parser.add_argument("--seeds", type=int, default=16, help="runs of a mutant (default: 16)")
    parser.add_argument("--only", default="", help="mutants whose place has these words")
    parser.add_argument("--minutes", type=float, default=math.inf, help="to go on at most")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fork has none of OpenMP's threads: it would wait for ever
    record = Record.open(args.record, args.case)
    left = try_all(record, args.seeds, args.only, args.minutes, args.jobs)
    survivors = record.survivors()
    print(f"{len(record.found)} tried, {survivors.total()} survive, {left} left")
    for (what, why), count in survivors.most_common():
        print(f"  {count} x {what} ({why or 'NOT EXPLAINED'})")


if __name__ == "__main__":
    main()
