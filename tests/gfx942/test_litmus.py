"""The exchanges of docs/SYNC.md as small HIP kernels (tests/lib/gfx942/hip/litmus.hip), in the adversarial memory.

The right ones are right in every run; those that lack something known to be needed are caught; and every wait, scope
bit, fence and barrier of the machine code that four code generators make of them is taken away or weakened in turn:
each loss is caught, or said why it does not matter. `python -m tests.gfx942.record` runs many more seeds.
"""

import pytest

from tests.lib.gfx942.backends import COMPILERS, FETCHED
from tests.lib.gfx942.clang import code_object
from tests.lib.gfx942.code_object import CodeObject
from tests.lib.gfx942.executor import PLAIN, Kernel
from tests.lib.gfx942.litmus import ARGUED, LITMUS, run
from tests.lib.gfx942.mutants import caught, mutants
from tests.lib.slow import some_always
from tests.lib.wheel_files import Absent

SEEDS = range(36)  # all of conditions and numbers of ranks
BLOCKS = {"publish", "rank_publish"}
KNOWN_BAD = {
    # what is left out: the kernels that then are wrong, and whether plain memory shows it
    "NO_DRAIN": (BLOCKS, False),
    "NO_RELEASE": (BLOCKS, False),
    "NO_ACQUIRE": (BLOCKS, False),
    "NO_BARRIER": (BLOCKS | {"all_gather", "rank_words"}, True),
    "WEAK_SCOPE": (set(LITMUS), False),
    "NO_WAIT": (set(LITMUS), False),
}


BY_EACH = pytest.mark.parametrize("compiler", some_always(COMPILERS, *(c for c in COMPILERS if c not in FETCHED)))


def compiled(compiler: str) -> CodeObject:
    try:
        return COMPILERS[compiler]("litmus.hip")
    except Absent as absent:
        pytest.skip(str(absent))


@BY_EACH
@pytest.mark.parametrize("name", LITMUS)
def test_the_exchanges_are_right(name, compiler):
    kernel = Kernel(compiled(compiler), name)
    assert [run(kernel, seed)[0] for seed in SEEDS] == [""] * len(SEEDS)


@pytest.mark.parametrize("left_out", KNOWN_BAD)
def test_what_is_known_to_be_wrong_is_caught(left_out):
    kernels, plainly = KNOWN_BAD[left_out]
    for name in LITMUS:
        kernel = Kernel(code_object("litmus.hip", f"-D{left_out}"), name)
        assert any(run(kernel, seed)[0] for seed in SEEDS) == (name in kernels)
        if not plainly:  # the adversarial memory is what shows it
            assert not any(run(kernel, seed, PLAIN)[0] for seed in range(4))


@pytest.mark.parametrize("compiler", some_always(COMPILERS, "clang-19"))
@pytest.mark.parametrize("name", LITMUS)
def test_every_mutant_is_caught_or_argued(name, compiler):
    kernel, survivors, count = Kernel(compiled(compiler), name), set(), 0
    for mutant in mutants(kernel):
        count += 1
        if not caught(mutant.kernel, lambda k, seed: run(k, seed)[0]):
            survivors.add(mutant.named())
    assert count >= 9
    assert survivors <= ARGUED[name].keys()
