"""The litmus kernels of hip/litmus.hip: what each is given, and what it must give."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.lib.gfx942.executor import Buffer, Execution, Fault, Kernel, Launch, Memory, round_robin

THREADS = 256
BLOCKS = 5
STEPS = 6
RANKS = (2, 4, 8)  # GPUs, by the seed
MOST_RANKS = 8
APART = 32  # words between flags
T = np.arange(THREADS, dtype=np.uint32)
u32 = np.uint32


@dataclass
class Setup:
    """Launches of a kernel on fresh buffers, what it writes, and what that must be."""

    launches: list[Launch]
    buffers: list[Buffer]
    out: np.ndarray
    expected: np.ndarray


def all_gather(steps: int, ranks: int) -> Setup:
    words, out = np.zeros(2 * BLOCKS, u32), np.zeros((BLOCKS, STEPS), u32)
    block, step = np.arange(BLOCKS), np.arange(STEPS)[:, None]
    sums = ((step * 31 + block * 7 + 1) * (block + 1)).sum(1)
    return _of_blocks([words, out], steps, np.tile(sums, (BLOCKS, 1)))


def _published(rank: int = 0) -> np.ndarray:
    epoch = np.arange(1, STEPS + 1, dtype=u32)[:, None]
    return epoch * u32(1000003) + T * u32(17) + u32(rank) + u32(3) * (epoch * u32(7919) + (T ^ u32(64)))


def publish(steps: int, ranks: int) -> Setup:
    data, words = np.zeros(2 * THREADS, u32), np.zeros(2 * APART, u32)
    out = np.zeros((BLOCKS, STEPS, THREADS), u32)
    return _of_blocks([data, words, out], steps, np.tile(_published(), (BLOCKS, 1, 1)))


def _of_blocks(arrays: list[np.ndarray], steps: int, expected: np.ndarray) -> Setup:
    """All blocks of one GPU; the last array is what they write."""
    args = [a.ctypes.data for a in arrays] + [BLOCKS, steps]
    launch = Launch(args, (BLOCKS, 1, 1), (THREADS, 1, 1))
    return Setup([launch], [Buffer(a) for a in arrays], arrays[-1], expected)


def rank_words(steps: int, ranks: int) -> Setup:
    step, rank = np.arange(STEPS, dtype=u32)[:, None], np.arange(ranks, dtype=u32)
    sent = (T + u32(65)) % u32(THREADS) * u32(7) + step * u32(31)
    sums = u32(ranks) * sent + rank.sum(dtype=u32) * u32(100000)
    return _of_ranks([np.zeros((ranks, 2, ranks, THREADS), u32)], steps, sums)


def rank_publish(steps: int, ranks: int) -> Setup:
    inboxes = np.zeros((ranks, ranks, 2, THREADS), u32)
    flags = np.zeros((ranks, 2, ranks, APART), u32)
    sums = sum(u32(r + 1) * _published(r) for r in range(ranks))
    return _of_ranks([inboxes, flags], steps, sums)


def _of_ranks(memories: list[np.ndarray], steps: int, each: np.ndarray) -> Setup:
    """A GPU a rank, of one block: it gets where all ranks' memories are, and each writes the same."""
    ranks = len(memories[0])
    tables = [np.zeros(MOST_RANKS, np.uint64) for _ in memories]
    for table, memory in zip(tables, memories, strict=True):
        table[:ranks] = [one.ctypes.data for one in memory]
    out = np.zeros((ranks, STEPS, THREADS), u32)
    launches = [
        Launch(
            [*(t.tobytes() for t in tables), out[rank].ctypes.data, rank, ranks, steps],
            (1, 1, 1),
            (THREADS, 1, 1),
            rank,
        )
        for rank in range(ranks)
    ]
    shared = [Buffer(one, True) for memory in memories for one in memory]
    return Setup(launches, shared + [Buffer(one) for one in out], out, np.tile(each, (ranks, 1, 1)))


LITMUS: dict[str, Callable[[int, int], Setup]] = {
    "all_gather": all_gather,
    "publish": publish,
    "rank_words": rank_words,
    "rank_publish": rank_publish,
}
# Mutants that no run can tell from the kernel, and why: named as Mutant.named does.
_ACQUIRES = "LLVM waits before it invalidates; here the branch that ended the poll has waited for every load"
ARGUED: dict[str, dict[str, str]] = {name: {} for name in LITMUS}
for _name in ("publish", "rank_publish"):
    for _less in ("no wait for vmcnt", "a wait for vmcnt but one"):
        ARGUED[_name][f"{_less} before BUFFER_INV"] = _ACQUIRES
# Ways in which workgroups may lie on XCDs, and waves run.
MAPS: list[Callable[[int], int]] = [round_robin, lambda group: 0, lambda group: group // 2, lambda group: group * 3 % 7]
EARLY = (0.05, 0.3, 0.9)
QUANTA = (1, 20, 200, 2000)  # instructions of a wave in a row
MOST_STEPS = 4_000_000  # ten times what a run takes that ends


def map_of(seed: int) -> Callable[[int], int]:
    """Of sixteen seeds in a row each map meets each of the QUANTA, by `memory_of` and `plain_of`."""
    return MAPS[seed % len(MAPS)]


def memory_of(seed: int) -> Memory:
    return Memory(True, EARLY[seed % 3], 0.02, 0.002, _quantum(seed))


def plain_of(seed: int) -> Memory:
    return Memory(quantum=_quantum(seed))


def _quantum(seed: int) -> int:
    return QUANTA[seed // len(MAPS) % len(QUANTA)]


def run(
    kernel: Kernel, seed: int, memory: Memory | None = None, steps: int = MOST_STEPS
) -> tuple[str, Execution | None]:
    """ "" if a run of the litmus kernel is right, else what was wrong; and the run, if it ended."""
    asked = 0 if seed % 16 == 15 else STEPS
    setup = LITMUS[kernel.name](asked, RANKS[seed // 12 % len(RANKS)])
    if not asked:
        setup.expected = np.zeros_like(setup.out)
    try:
        done = kernel.run(setup.launches, setup.buffers, memory or memory_of(seed), seed, 0, map_of(seed), steps)
    except Fault as fault:
        return f"{type(fault).__name__}: {fault}", None
    wrong = int((setup.out != setup.expected).sum())
    return f"{wrong} wrong values" if wrong else "", done
