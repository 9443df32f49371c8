"""The litmus kernels of hip/litmus.hip: what each is given, and what it must give."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.lib.gfx942.executor import Buffer, Execution, Fault, Kernel, Launch, Memory, round_robin

THREADS = 256
BLOCKS = 5
STEPS = 6
T = np.arange(THREADS, dtype=np.uint32)
u32 = np.uint32


@dataclass
class Setup:
    """Launches of a kernel on fresh buffers, what it writes, and what that must be."""

    launches: list[Launch]
    buffers: list[Buffer]
    out: np.ndarray
    expected: np.ndarray


def _setup(
    args: list[list[np.ndarray | int]],
    shared: list[np.ndarray],
    out: np.ndarray,
    expected: np.ndarray,
) -> Setup:
    arrays = {id(a): a for one in args for a in one if isinstance(a, np.ndarray)}
    grid = (BLOCKS if len(args) == 1 else 1, 1, 1)
    launches = [
        Launch(
            [a if isinstance(a, int) else a.ctypes.data for a in one], grid, (THREADS, 1, 1), gpu
        )
        for gpu, one in enumerate(args)
    ]
    with_host = {id(a) for a in shared}
    return Setup(
        launches, [Buffer(a, key in with_host) for key, a in arrays.items()], out, expected
    )


def all_gather(steps: int) -> Setup:
    words, out = np.zeros(2 * BLOCKS, u32), np.zeros((BLOCKS, STEPS), u32)
    block, step = np.arange(BLOCKS), np.arange(STEPS)[:, None]
    sums = ((step * 31 + block * 7 + 1) * (block + 1)).sum(1)
    return _setup([[words, out, BLOCKS, steps]], [], out, np.tile(sums, (BLOCKS, 1)))


def _published(rank: int = 0) -> np.ndarray:
    epoch = np.arange(1, STEPS + 1, dtype=u32)[:, None]
    return (
        epoch * u32(1000003)
        + T * u32(17)
        + u32(rank)
        + u32(3) * (epoch * u32(7919) + (T ^ u32(64)))
    )


def publish(steps: int) -> Setup:
    data, words, out = (
        np.zeros(2 * THREADS, u32),
        np.zeros(64, u32),
        np.zeros((BLOCKS, STEPS, THREADS), u32),
    )
    return _setup(
        [[data, words, out, BLOCKS, steps]], [], out, np.tile(_published(), (BLOCKS, 1, 1))
    )


def rank_words(steps: int) -> Setup:
    inbox, out = np.zeros((2, 2 * THREADS), u32), np.zeros((2, STEPS, THREADS), u32)
    args = [[inbox[r], inbox[1 - r], out[r], r, steps] for r in (0, 1)]
    step = np.arange(STEPS, dtype=u32)[:, None]
    sums = 2 * step * u32(31) + (T + (T + u32(65)) % u32(THREADS)) * u32(7) + u32(100000)
    return _setup(
        args, [args[0][0], args[0][1], args[1][0], args[1][1]], out, np.stack([sums, sums])
    )


def rank_publish(steps: int) -> Setup:
    inbox, flags = np.zeros((2, 2 * THREADS), u32), np.zeros((2, 64), u32)
    out = np.zeros((2, STEPS, THREADS), u32)
    args = [[inbox[r], inbox[1 - r], flags[r], flags[1 - r], out[r], r, steps] for r in (0, 1)]
    shared = [a for one in args for a in one[:4]]
    return _setup(args, shared, out, np.stack([_published(1), _published(0)]))


LITMUS: dict[str, Callable[[int], Setup]] = {
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
MAPS: list[Callable[[int], int]] = [
    round_robin,
    lambda group: 0,
    lambda group: group // 2,
    lambda group: group * 3 % 7,
]
EARLY = (0.05, 0.3, 0.9)
MOST_STEPS = 400_000  # ten times what a run takes that ends


def memory_of(seed: int) -> Memory:
    return Memory(True, EARLY[seed % 3], 0.02, 0.002, (1, 20, 200, 2000)[seed % 4])


def run(
    kernel: Kernel, seed: int, memory: Memory | None = None, steps: int = MOST_STEPS
) -> tuple[str, Execution | None]:
    """ "" if a run of the litmus kernel is right, else what was wrong; and the run, if it ended."""
    asked = 0 if seed % 16 == 15 else STEPS
    setup = LITMUS[kernel.name](asked)
    if not asked:
        setup.expected = np.zeros_like(setup.out)
    try:
        done = kernel.run(
            setup.launches,
            setup.buffers,
            memory or memory_of(seed),
            seed,
            0,
            MAPS[seed % len(MAPS)],
            steps,
        )
    except Fault as fault:
        return f"{type(fault).__name__}: {fault}", None
    wrong = int((setup.out != setup.expected).sum())
    return f"{wrong} wrong values" if wrong else "", done
