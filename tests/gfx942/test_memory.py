"""The adversarial memory is as weak as the documents allow: who relies on more is seen (hip/undocumented.hip)."""

import numpy as np
import pytest

from tests.lib.gfx942.clang import code_object
from tests.lib.gfx942.executor import PLAIN, Buffer, Fault, Kernel, Launch, Memory
from tests.lib.gfx942.litmus import MOST_STEPS, memory_of

LANES = 64
SEEDS = range(200)
TWO_WAVES = ("ended", "met", "raced")


def right(name: str, seed: int, memory: Memory) -> bool:
    """Whether every lane of the reading workgroup has seen what the other wrote before."""
    words, out = np.zeros(1024, np.uint32), np.zeros(LANES, np.uint32)
    launch = Launch([words.ctypes.data, out.ctypes.data], (2, 1, 1), (LANES + LANES * (name in TWO_WAVES), 1, 1))
    kernel = Kernel(code_object("undocumented.hip"), name)
    kernel.run(launch, [Buffer(words), Buffer(out)], memory, seed, steps=MOST_STEPS)
    return out.tolist() == [5] * LANES


def broken(name: str, seed: int, memory: Memory) -> bool:
    try:
        return not right(name, seed, memory)
    except Fault as fault:
        return "is touched while a load is to fill it" in str(fault)


@pytest.mark.parametrize("name", ["lanes", "wide", "line", "unread", "refilled", "ended", "counters"])
def test_what_no_document_promises_is_broken(name):
    assert any(broken(name, seed, memory_of(seed)) for seed in SEEDS)
    assert all(right(name, seed, PLAIN) for seed in range(4))


def test_eight_aligned_bytes_are_not_torn():
    assert all(right("aligned", seed, memory_of(seed)) for seed in SEEDS)


def test_an_acquire_behind_a_wait_finds_what_was_stored():
    assert all(right("acquired", seed, memory_of(seed)) for seed in SEEDS)


def test_waves_of_a_workgroup_find_what_was_stored_ahead_of_a_barrier():
    assert all(right("met", seed, memory_of(seed)) for seed in SEEDS)


def test_waves_of_a_workgroup_that_no_barrier_parts_race():
    """A load that comes ahead of the other wave's store is none yet: not every seed shows it."""
    for memory in (PLAIN, memory_of(1)):
        with pytest.raises(Fault, match="a race for memory between waves of a workgroup"):
            for seed in range(2):
                right("raced", seed, memory)
