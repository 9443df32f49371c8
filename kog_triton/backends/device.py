"""What backends and benchmarks ask of a torch device: which GPU it is, and how long it takes for what it is given."""

import time
from collections.abc import Callable

import torch

from kog_triton.backends.nvidia_driver import read_gpu
from kog_triton.model.spec import DType
from kog_triton.schedule.topology import Gpu, Seen, describe

TORCH_DTYPES = {DType.F32: torch.float32, DType.BF16: torch.bfloat16, DType.F16: torch.float16}


def gpu_of(device: torch.device) -> Gpu | None:
    """The GPU as its driver describes it; None for a CPU."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return describe(_read_amd(index) if torch.version.hip else read_gpu(index))


def _read_amd(index: int) -> Seen:
    """By torch, which asks HIP."""
    of = torch.cuda.get_device_properties(index)
    return Seen(
        of.name,
        "amd",
        of.gcnArchName.split(":")[0],
        of.multi_processor_count,
        of.shared_memory_per_block,
        of.total_memory,
        of.L2_cache_size,
        getattr(of, "memory_clock_rate", 0) * 1e3,  # kHz; torch tells both since 2.9
        getattr(of, "memory_bus_width", 0),
        of.warp_size,
    )


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
