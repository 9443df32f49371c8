"""How long all blocks of a kernel wait for each other, by method: the other price of a token.

    python benchmarks/micro/exchange.py [--json FILE]

    counter   a barrier: every block adds to one counter and polls it
    gather    a barrier, and behind it every block reads a vector that all blocks wrote
    phase     no barrier: every word of the vector carries a phase bit, readers poll the words

Portable Triton. Each block's next values depend on all it read, and the end result is compared with
the same recurrence on the host, so that an exchange that does not wait is found out.
"""

import sys
from statistics import median

import numpy as np
import torch
import triton
import triton.language as tl
from figures import arguments, finish

WORDS = 2048  # of the vector, int32: a residual stream
ROUNDS = 2000
LIMIT = tl.constexpr(1 << 22)  # polls before a wait gives up: a lost word must not hang the GPU


@triton.jit
def fresh(ptr, NVIDIA: tl.constexpr):
    """What memory holds, past this block's cache. Triton drops `volatile` on AMD and honors .cv."""
    if NVIDIA:
        return tl.load(ptr, volatile=True)
    else:
        return tl.load(ptr, cache_modifier=".cv")


@triton.jit
def wait_for(counter, want, NVIDIA: tl.constexpr):
    """Until the counter reaches `want`; orders what others wrote before what follows."""
    seen = fresh(counter, NVIDIA)
    polls = 0
    while (seen < want) & (polls < LIMIT):
        seen = fresh(counter, NVIDIA)
        polls += 1
    tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def counter_kernel(counter, vector, out, rounds, GATHER: tl.constexpr, WORDS: tl.constexpr, NVIDIA: tl.constexpr):
    """`rounds` barriers; with GATHER each one publishes and reads a vector of two in turn."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, WORDS)
    total = 0
    for i in range(rounds):
        if GATHER:
            mine = (at >= block * WORDS // blocks) & (at < (block + 1) * WORDS // blocks)
            tl.store(vector + i % 2 * WORDS + at, (total + i + at) & 0xFFFF, mask=mine)
        tl.debug_barrier()
        tl.atomic_add(counter, 1, sem="release", scope="gpu")
        wait_for(counter, (i + 1) * blocks, NVIDIA)
        if GATHER:
            total = tl.sum(fresh(vector + i % 2 * WORDS + at, NVIDIA)) & 0xFFFF
    tl.store(out + block, total)


@triton.jit
def phase_kernel(vector, out, rounds, WORDS: tl.constexpr, NVIDIA: tl.constexpr):
    """Word = value * 2 + phase. Two buffers suffice: who writes a buffer again has seen every block
    publish the round between, and a block publishes that only after it has read this one."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, WORDS)
    mine = (at >= block * WORDS // blocks) & (at < (block + 1) * WORDS // blocks)
    total = 0
    for i in range(rounds):
        phase = (i // 2 + 1) & 1  # buffers start as zeros: the first use is phase 1
        buffer = vector + i % 2 * WORDS + at
        tl.store(buffer, ((total + i + at) & 0xFFFF) * 2 + phase, mask=mine, cache_modifier=".wt")
        words = fresh(buffer, NVIDIA)
        late = tl.max((words & 1) ^ phase)
        polls = 0
        while (late > 0) & (polls < LIMIT):
            words = fresh(buffer, NVIDIA)
            late = tl.max((words & 1) ^ phase)
            polls += 1
        total = tl.sum(words >> 1) & 0xFFFF
    tl.store(out + block, total)


def expected(rounds: int) -> int:
    """What every block holds in the end."""
    total = 0
    for i in range(rounds):
        total = int(((total + i + np.arange(WORDS)) & 0xFFFF).sum()) & 0xFFFF
    return total


def launch(method: str, blocks: int, rounds: int, device: str) -> torch.Tensor:
    """Run one method once; the value that each block ends with, int32 [blocks]."""
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    vector = torch.zeros(2 * WORDS, dtype=torch.int32, device=device)
    out = torch.zeros(blocks, dtype=torch.int32, device=device)
    options: dict[str, object] = {"WORDS": WORDS}
    options["NVIDIA"] = device != "cpu" and not torch.version.hip
    if device != "cpu":
        options |= {"num_warps": 8, "launch_cooperative_grid": True}
    if method == "phase":
        phase_kernel[(blocks,)](vector, out, rounds, **options)
    else:
        gather = method == "gather"
        counter_kernel[(blocks,)](counter, vector, out, rounds, GATHER=gather, **options)
    return out


def right(method: str, blocks: int, rounds: int, device: str) -> bool:
    """Whether all blocks end with what the recurrence says; a bare barrier carries no value."""
    want = 0 if method == "counter" else expected(rounds)
    return bool((launch(method, blocks, rounds, device) == want).all())


def microseconds(method: str, blocks: int) -> float:
    """One exchange: the difference between two lengths of run, by events, median of 5."""
    spans = []
    for _ in range(5):
        ends = []
        for rounds in (ROUNDS, 2 * ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch(method, blocks, rounds, "cuda")
            end.record()
            end.synchronize()
            ends.append(start.elapsed_time(end) * 1e3)
        spans.append((ends[1] - ends[0]) / ROUNDS)
    return median(spans)


def main() -> None:
    args = arguments("exchange", "How long all blocks of a kernel wait for each other.")
    if not torch.cuda.is_available():
        sys.exit("a GPU is needed: without one no two blocks run at the same time")
    blocks = torch.cuda.get_device_properties("cuda").multi_processor_count
    found = {}
    for method in ("counter", "gather", "phase"):
        if not right(method, blocks, 200, "cuda"):
            sys.exit(f"{method}: wrong result, an exchange did not wait")
        found[method] = microseconds(method, blocks)
    finish("exchange", "us", found, args.json, f"{blocks} blocks, {WORDS} words, an exchange")


if __name__ == "__main__":
    main()
