"""torch's all-reduces by CUDA graph, a process a GPU: NCCL, and symmetric memory's in one shot.

    python -m kog_triton.bench.peers.torch_collectives RANK RANKS ADDRESS BACKEND BYTES ...

Rank 0 prints a JSON object: {name: {bytes: microseconds}}. BACKEND is nccl, or gloo for a test of all this on a CPU.
"""

import json
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

CALLS, REPLAYS = 50, 20  # of a graph; the fastest replay counts


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one of CALLS calls, the fastest of REPLAYS times."""
    from kog_triton.backends.device import Clock

    call()
    run = call
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        run = graph.replay
    best = float("inf")
    for _ in range(REPLAYS):
        dist.barrier()
        seconds = Clock(device)
        run()
        best = min(best, seconds())
    return best * 1e6 / (CALLS if device.type == "cuda" else 1)


def measure(backend: str, sizes: list[int], device: torch.device) -> dict[str, dict[int, float]]:
    """Of bf16 vectors of so many bytes. RuntimeError of torch's if sums are wrong or something is missing."""
    found: dict[str, dict[int, float]] = {backend: {}}
    world = dist.get_world_size()
    for size in sizes:
        vector = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
        dist.all_reduce(vector)
        if not (vector == world).all():
            raise RuntimeError(f"{backend}: wrong sums")
        vector.zero_()  # sums of sums stay finite
        found[backend][size] = microseconds(partial(dist.all_reduce, vector), device)
    if device.type == "cuda":
        import torch.distributed._symmetric_memory as symmetric

        group = dist.group.WORLD
        assert group is not None
        found["symmetric memory"] = {}
        for size in sizes:
            shared = symmetric.empty(size // 2, dtype=torch.bfloat16, device=device)
            symmetric.rendezvous(shared, group)
            shared.fill_(1)

            def one_shot(shared: torch.Tensor = shared) -> torch.Tensor:
                out: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group.group_name)
                return out

            if not (one_shot() == world).all():
                raise RuntimeError("symmetric memory: wrong sums")
            found["symmetric memory"][size] = microseconds(one_shot, device)
    return found


def main(argv: list[str]) -> None:
    rank, ranks, address, backend, *sizes = argv
    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=address, rank=int(rank), world_size=int(ranks))
    try:
        found = measure(backend, [int(size) for size in sizes], device)
    finally:
        dist.destroy_process_group()
    if int(rank) == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
