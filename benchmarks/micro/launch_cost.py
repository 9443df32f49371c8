"""What starting a kernel costs: the price that a persistent kernel pays once and others at every op.

    python benchmarks/micro/launch_cost.py [--json FILE]

plain      empty Triton kernels, one launch after another, host and device together
graph      the same, captured in a graph and replayed
torch      x.add_(1) on one element: what an eager operation costs
answer     one launch and one read of its result on the host: a round trip
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import triton
import triton.language as tl
from figures import arguments, finish

LAUNCHES = 500


@triton.jit
def empty(out):
    if tl.program_id(0) < 0:
        tl.store(out, 1)


def microseconds(work: Callable[[], None], count: int) -> float:
    """Median time of one of `count` things that `work` does, waiting for the GPU at the end."""
    spans = []
    for _ in range(8):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        spans.append((time.perf_counter() - started) / count * 1e6)
    return median(spans[1:])


def main() -> None:
    args = arguments("launch_cost", "What starting a kernel costs.")
    if not torch.cuda.is_available():
        sys.exit("a GPU is needed to launch kernels on: torch sees none")
    x = torch.zeros(1, device="cuda")

    def plain() -> None:
        for _ in range(LAUNCHES):
            empty[(1,)](x)

    def eager() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    def answer() -> None:
        for _ in range(LAUNCHES):
            x.add_(1).item()

    plain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain()
    works = {"plain": plain, "graph": graph.replay, "torch": eager, "answer": answer}
    found = {name: microseconds(work, LAUNCHES) for name, work in works.items()}
    finish("launch_cost", "us", found, args.json, f"each, median of 7 x {LAUNCHES}")


if __name__ == "__main__":
    main()
