"""What backends and benchmarks ask of a torch device: which GPU it is, and how long it takes for what it is given."""

import time
from collections.abc import Callable

import torch

from kog_triton.errors import DeviceError
from kog_triton.model.spec import DType
from kog_triton.schedule.topology import Gpu, find_gpu

TORCH_DTYPES = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}


def gpu_of(device: torch.device) -> Gpu | None:
    """Its row in the table of known GPUs; None for a CPU and for a GPU without a row."""
    if device.type != "cuda":
        return None
    try:
        return find_gpu(torch.cuda.get_device_name(device))
    except DeviceError:
        return None


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
