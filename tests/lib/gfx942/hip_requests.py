"""The requests that the HIP kernel's machine code runs in the executor, and mutants of that code."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from kog_triton.sampling import SamplingParams
from tests.lib.gfx942 import requests
from tests.lib.gfx942.backends import CLANG
from tests.lib.gfx942.executor import WEAK, Fault, Memory
from tests.lib.gfx942.hip_kernel import INCLUDES, HipWalk
from tests.lib.gfx942.requests import LONG, TOKENS, Asked, expected, reference_tokens
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.triton_cases import plain

# Of bfloat16, those whose tokens rounding does not change.
NAMES = {"llama": ("greedy", "sampled", "rules", "edits", "masks"), "qwen3": ("greedy", "edits"),
         "laneformer": ("greedy", "sampled", "rules", "edits")}  # fmt: skip
RUNS = [(case, name) for case, names in NAMES.items() for name in names if name != "masks"]
FINISHED = 2  # Outcome.LENGTH
STOPPED = 1  # Outcome.STOP
# Instructions on up to eight blocks: three times what the longest request takes.
MOST_STEPS = 60_000_000
# Short contexts that are split over all blocks, and whose many splits are joined in a step of their own.
SPLIT = plain(2, hidden_size=64, num_kv_heads=1)
LENGTHS = {"split_least": 4, "merged_length": 16}
SPLIT_NAMES = ("long prompt", "edits", "sampled")
# More splits than a warp joins, each with a position, as in a context of full length. In the kernel of columns a block
# that walks a short context alone has two of its query heads, which two waves share.
HEADS = plain(1, hidden_size=136, num_heads=18, num_kv_heads=1, head_dim=128)
HEADS_BLOCKS, HEADS_LENGTHS = 17, {"split_least": 4, "merged_length": 4}
# Weights of which each stage, as it ends, asks for the first of what follows (include/kog/between.h, kInTail).
TAILS = plain(2, hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=512)
TAILS_BLOCKS = 4
TAILS_NAMES = ("greedy", "sampled", "edits")
CONDITIONS = {
    "plain": {"memory": Memory(quantum=4000)},
    "adversarial": {"memory": WEAK, "xcc": lambda group: group * 5 % 7},
}
ASKED = requests.ASKED | {
    "twelve": Asked(SamplingParams(temperature=0.0), LONG[:12]),
    "twelve, rules": Asked(SamplingParams(temperature=0.9, top_k=12, seed=7), LONG[:12]),
}


def most_steps(num_blocks: int) -> int:
    """Instructions after which a request on so many blocks has no end: polls of more blocks take more."""
    return MOST_STEPS * -(-num_blocks // 8)


@cache
def walk(case: str, includes: tuple[Path, ...] = INCLUDES, compiler: str = CLANG) -> HipWalk:
    one = CASES[case]
    weights = ArrayWeights(one.spec)
    return HipWalk(one.spec, weights, one.num_blocks, includes=includes, compiler=compiler)


@cache
def split_walk(includes: tuple[Path, ...] = INCLUDES) -> HipWalk:
    return HipWalk(SPLIT, ArrayWeights(SPLIT), 8, includes=includes, **LENGTHS)


@cache
def heads_walk() -> HipWalk:
    return HipWalk(HEADS, ArrayWeights(HEADS), HEADS_BLOCKS, **HEADS_LENGTHS)


@cache
def tails_walk(includes: tuple[Path, ...] = INCLUDES) -> HipWalk:
    return HipWalk(TAILS, ArrayWeights(TAILS), TAILS_BLOCKS, includes=includes)


@cache
def split_tokens(name: str = "long prompt") -> list[int]:
    return reference_tokens(SPLIT, ASKED[name])


@cache
def tails_tokens(name: str) -> list[int]:
    return reference_tokens(TAILS, ASKED[name])


def generate(
    one: HipWalk, name: str, conditions: dict[str, Any], seed: int = 1, stops: Any = ()
) -> tuple[list[int], int]:
    one.conditions = {"steps": most_steps(one.layout.lowering.num_blocks)} | conditions
    asked = ASKED[name]
    return one.generate(list(asked.prompt), TOKENS, asked.params, stops, seed)


def wrong(one: HipWalk, name: str, tokens: list[int], conditions: dict[str, Any], seed: int) -> str:
    """ "" if a request gives these tokens, else what it did instead."""
    try:
        made = generate(one, name, conditions, seed)
    except (Fault, AssertionError) as fault:
        return f"{type(fault).__name__}: {str(fault)[:200]}"
    return "" if made == (tokens, FINISHED) else f"tokens {made}"


def asked() -> Iterator[tuple[str, str, HipWalk, Callable[[], list[int]]]]:
    """Case, request, the model that is to run it, and what gives its tokens."""
    for case, name in RUNS:
        yield case, name, walk(case), lambda case=case, name=name: expected(case, name)
    for name in SPLIT_NAMES:
        yield "split", name, split_walk(), lambda name=name: split_tokens(name)
    yield "heads", "twelve", heads_walk(), lambda: reference_tokens(HEADS, ASKED["twelve"])
    for name in TAILS_NAMES:
        yield "tails", name, tails_walk(), lambda name=name: tails_tokens(name)
