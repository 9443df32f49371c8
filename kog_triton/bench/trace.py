"""How many kernels one request takes, by torch's profiler: the proof of "one kernel per request".

Copies and fills that the driver does itself (memcpy, memset) are no kernels; they are counted apart.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kog_triton.errors import DeviceError


def trace_kernels(request: Callable[[], Any]) -> dict[str, Any]:
    """What the GPU ran during one request; DeviceError without a GPU."""
    if not torch.cuda.is_available():
        raise DeviceError("--no-kernel-switches counts kernels on a GPU, and torch sees none")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        request()
        torch.cuda.synchronize()
    return count(e.name for e in trace.events() or () if e.device_type == DeviceType.CUDA)


def count(names: Iterable[str]) -> dict[str, Any]:
    """Launches of kernels by name, and how many copies and fills came with them."""
    kernels: Counter[str] = Counter()
    copies = fills = 0
    for name in names:
        if name.startswith(("Memcpy", "Memset")):
            copies += name.startswith("Memcpy")
            fills += name.startswith("Memset")
        else:
            kernels[name] += 1
    return {"launches": kernels.total(), "kernels": dict(kernels.most_common(20)), "copies": copies, "fills": fills}
