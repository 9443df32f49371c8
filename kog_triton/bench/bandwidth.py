"""The read bandwidth of this very GPU, measured in the same run as the tokens: the roofline to compare with.

    triton  plain 16-byte loads into registers, on any GPU that Triton compiles for
    bulk    cp.async.bulk into a ring of shared memory (sm_90 and newer, through cupy): bulk_read.cu
    torch   a sum, where there is no GPU

A method that cannot run here is named with its reason. Bytes / s are medians over REPEATS.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch

from kog_triton.backends.device import Clock
from kog_triton.schedule.topology import Gpu

# What the H200 reached on which the project's absolute targets were set, by bulk copies.
TARGET_READ = 4.58e12  # bytes / s
GPU_BYTES = 4 << 30  # many times any L2
CPU_BYTES = 128 << 20
REPEATS = 7


def measure_bandwidth(device: torch.device, gpu: Gpu | None, num_gpus: int) -> dict[str, Any]:
    """The `bandwidth` part of a record; rates are of one GPU times `num_gpus`.

    `scale` is the best measured rate of one GPU over TARGET_READ: what to multiply an absolute
    target with on this machine; null without a GPU.
    """
    methods: dict[str, float] = {}
    absent: dict[str, str] = {}
    if device.type == "cpu":
        methods["torch"] = cpu_read_rate(CPU_BYTES)
    else:
        buffer = _buffer(device)
        for name, read in (("triton", triton_read_rate), ("bulk", bulk_read_rate)):
            try:
                methods[name] = read(buffer)
            except Exception as error:  # also a compiler's: the tokens can be timed without it
                absent[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        del buffer
        torch.cuda.empty_cache()
    best = max(methods.values(), default=None)
    return {
        "datasheet": gpu.bandwidth * num_gpus if gpu else None,
        "methods": {name: rate * num_gpus for name, rate in methods.items()},
        "absent": absent,
        "measured": best * num_gpus if best else None,
        "scale": best / TARGET_READ if best and device.type != "cpu" else None,
    }


def cpu_read_rate(num_bytes: int) -> float:
    """Bytes / s of a sum over memory that no cache holds, with torch's threads."""
    buffer = torch.ones(num_bytes // 8, dtype=torch.int64)
    return num_bytes / median_seconds(buffer.device, buffer.sum)


def triton_read_rate(buffer: torch.Tensor) -> float:
    if find_spec("triton") is None:
        raise ImportError("triton is not installed")
    from kog_triton.bench.read_kernel import read_all

    out = torch.zeros(1, dtype=torch.int32, device=buffer.device)
    reads = (partial(read_all, buffer, out, per_sm) for per_sm in (1, 2, 4))
    return max(buffer.nbytes / median_seconds(buffer.device, read) for read in reads)


def bulk_read_rate(buffer: torch.Tensor) -> float:
    if torch.version.hip or torch.cuda.get_device_capability(buffer.device)[0] < 9:
        raise NotImplementedError("bulk copies need sm_90 or newer")
    if find_spec("cupy") is None:
        raise ImportError("cupy is not installed: pip install cupy-cuda13x")
    from kog_triton.bench.bulk_read import BulkReader

    reader = BulkReader(buffer)
    return buffer.nbytes / median_seconds(buffer.device, reader.read)


def median_seconds(device: torch.device, launch: Callable[[], Any]) -> float:
    """Of a launch by the device's clock; the first two do not count."""
    spans = []
    for _ in range(REPEATS + 2):
        seconds = Clock(device)
        launch()
        spans.append(seconds())
    return median(spans[2:])


def _buffer(device: torch.device) -> torch.Tensor:
    """Random words, int32: DRAM that holds zeros can be faster than DRAM that holds weights."""
    free, _ = torch.cuda.mem_get_info(device)
    words = min(GPU_BYTES, free // 4) // (1 << 25) * (1 << 25) // 4
    if not words:
        raise NotImplementedError("less than 128 MiB of GPU memory is free")
    return torch.randint(-(1 << 31), 1 << 31, (words,), dtype=torch.int32, device=device)
