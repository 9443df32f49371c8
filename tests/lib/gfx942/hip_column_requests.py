"""Requests that share a step, each in a column of its own, which the HIP kernel's machine code runs in the executor."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kog_triton.backends.token_words import Outcome
from kog_triton.model.spec import ModelSpec
from tests.lib.gfx942.backends import CLANG
from tests.lib.gfx942.executor import Fault
from tests.lib.gfx942.hip_columns import HipColumns
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.gfx942.hip_requests import ASKED, HEADS, HEADS_BLOCKS, HEADS_LENGTHS, MOST_STEPS, SPLIT, most_steps
from tests.lib.gfx942.requests import TOKENS, reference_tokens
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.triton_cases import plain

# All that a kernel of one token is asked, and what a cut of K brings: fragments of four rows, where words are
# multiplied and where x is, and a unit of more fragments than are on their way at once.
SPECS = {name: case.spec for name, case in CASES.items()} | {
    "split": SPLIT,
    # Of layers that split, each second one: the phase of a split's words is the same in all of them.
    "windows": SPLIT.replace(windows=(4, 0)),
    "four rows": plain(2, hidden_size=36, intermediate_size=2048),
    "four rows of x": plain(1, hidden_size=1024, intermediate_size=64, head_dim=8),
    "a long K": plain(1, hidden_size=64, intermediate_size=8192),
    # What several waves of a block share: its ids, and the results that it merges.
    "waves": plain(2, hidden_size=64, num_kv_heads=1, head_dim=128, vocab_size=1600, windows=(4, 0)),
    "heads": HEADS,
}
BLOCKS = {"qwen3": 16, "four rows": 2, "four rows of x": 16, "waves": 16, "heads": HEADS_BLOCKS}
# Contexts of ten positions whose splits are one block's, then few blocks', then all blocks', none without a position.
SPLITS = {"split_least": 2, "merged_length": 4}
LENGTHS = {"split": SPLITS, "windows": SPLITS, "waves": SPLITS, "heads": HEADS_LENGTHS}
FOUR = ("greedy", "sampled", "rules", "edits")
SHARED = {
    "llama": ("greedy", "sampled"),
    "llama of four": FOUR,
    "llama of eight": FOUR + FOUR[::-1],  # two column sets, which are not alike
    "qwen3": ("greedy", "edits"),
    "laneformer": ("sampled", "rules"),
    "split": ("edits", "sampled"),
    "windows": ("edits", "sampled"),
    "four rows": FOUR,
    "four rows of x": FOUR,
    "a long K": ("greedy", "sampled"),
    "waves": ("edits", "sampled"),
    "heads": ("twelve", "twelve, rules"),
    "llama on two GPUs": FOUR,
    "laneformer on two GPUs": ("sampled", "rules"),
}


def spec_of(case: str) -> ModelSpec:
    return SPECS[re.sub(" of four| of eight| on two GPUs", "", case)]


def gpus_of(case: str) -> int:
    return 2 if case.endswith(" on two GPUs") else 1


def blocks_of(case: str) -> int:
    """Of a GPU."""
    return BLOCKS.get(case, 8 // gpus_of(case))


def columns(case: str, includes: tuple[Path, ...] = INCLUDES, compiler: str = CLANG) -> HipColumns:
    return made(case, includes, compiler)


@cache
def made(case: str, includes: tuple[Path, ...], compiler: str) -> HipColumns:
    spec, count = spec_of(case), max(2, len(SHARED[case]))
    how = {"includes": includes, "compiler": compiler, "gpus": gpus_of(case)}
    weights, lengths = ArrayWeights(spec), LENGTHS.get(case, {})
    return HipColumns(spec, weights, count, blocks_of(case), **how, **lengths)


@cache
def expected(case: str, name: str) -> list[int]:
    return reference_tokens(spec_of(case), ASKED[name])


@cache
def chunks(gpus: int = 1) -> HipColumns:
    """Of the first case: four positions of a prompt a step."""
    spec = spec_of("llama")
    return HipColumns(spec, ArrayWeights(spec), 4, 8 // gpus, chunk=True, gpus=gpus)


def serve(
    case: str,
    conditions: dict[str, Any],
    names: Sequence[str] = (),
    seed: int = 1,
    includes: tuple[Path, ...] = INCLUDES,
    tokens: int = TOKENS,
    compiler: str = CLANG,
) -> list[tuple[list[int], Outcome]]:
    """Of requests beside each other, in as many columns."""
    asked = [ASKED[n].request(slot, tokens) for slot, n in enumerate(names or SHARED[case])]
    steps = most_steps(blocks_of(case))
    return columns(case, includes, compiler).serve(asked, seed, steps=steps, **conditions)


def wrong(
    case: str, conditions: dict[str, Any], seed: int = 1, includes: tuple[Path, ...] = INCLUDES, compiler: str = CLANG
) -> str:
    """ "" if the requests give the reference's tokens, else what they did instead."""
    try:
        made = serve(case, conditions, seed=seed, includes=includes, compiler=compiler)
    except (Fault, AssertionError) as fault:
        return f"{type(fault).__name__}: {str(fault)[:200]}"
    right = [(expected(case, name), Outcome.LENGTH) for name in SHARED[case]]
    return "" if made == right else f"tokens {made}, not {right}"


def wrong_prompt(conditions: dict[str, Any], seed: int = 1, gpus: int = 1) -> str:
    """As `wrong`, of a prompt in chunks and its first token; what follows is another kernel's (test_hip_backend.py)."""
    request = ASKED["long prompt"].request()
    try:
        made = chunks(gpus).prompt(request, seed, steps=MOST_STEPS, **conditions)
    except (Fault, AssertionError) as fault:
        return f"{type(fault).__name__}: {str(fault)[:200]}"
    return "" if made == expected("llama", "long prompt")[:1] else f"tokens {made}"
