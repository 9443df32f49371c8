"""How long a device takes for what it is given."""

import time
from collections.abc import Callable

import torch


def clock(device: torch.device) -> Callable[[], float]:
    """Starts after all that is queued; calling the result waits for what was queued since: the seconds it took.

    By the GPU's clock, on the current stream; on a CPU by the host's.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        return lambda: time.perf_counter() - started
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()

    def stop() -> float:
        ended.record()
        ended.synchronize()
        return begun.elapsed_time(ended) / 1e3

    return stop
