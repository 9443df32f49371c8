"""What backends and benchmarks ask of a torch device: which GPU it is, and how long it takes for what it is given."""

import time

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
    )


class Clock:
    """Starts after all that is queued; calling it waits for what was queued since, or until `stop`: its seconds.

    By the GPU's clock, on the current stream; on a CPU by the host's.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._ended: torch.cuda.Event | None = None
        if self._gpu:
            self._begun = torch.cuda.Event(enable_timing=True)
            self._begun.record()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """What is queued from now on does not count; on a CPU nothing is queued."""
        if self._gpu:
            self._ended = torch.cuda.Event(enable_timing=True)
            self._ended.record()

    def __call__(self) -> float:
        if self._ended is None:
            self.stop()
        if self._ended is None:
            return time.perf_counter() - self._started
        self._ended.synchronize()
        return self._begun.elapsed_time(self._ended) / 1e3
