"""What this process holds of the host's memory and of the GPU's, whatever runs beside it."""

import ctypes
import os
from pathlib import Path

import torch


def host_bytes() -> int:
    """Resident bytes, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def gpu_memory() -> dict[str, int | None]:
    """By torch's allocators: tensors on the GPU, their bytes, bytes of pinned tensors; and the driver's count."""
    torch.cuda.synchronize()
    # Only with the next one does torch let go of pinned tensors that copies have read.
    torch.empty(1, pin_memory=True)
    gpu, pinned = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    return {
        "tensors": gpu["allocation.all.current"],
        "bytes": gpu["allocated_bytes.all.current"],
        "pinned": pinned["allocated_bytes.current"],
        "driver": _driver_bytes(),
    }


def leaked(before: dict[str, int | None], after: dict[str, int | None], requests: int) -> list[str]:
    """What `gpu_memory` counts more or less of than before `requests`.

    Pinned bytes may have become more, by less than a byte a request: what torch keeps for the next pinned tensor grows
    with the most there were at a time, a few words where a copy came late.
    """
    grown = (after["pinned"] or 0) - (before["pinned"] or 0)
    pinned = [] if 0 <= grown < requests else [f"pinned: {grown} bytes more"]
    names = before.keys() - {"pinned"}
    return pinned + [f"{n}: {before[n]} -> {after[n]}" for n in names if before[n] != after[n]]


def _driver_bytes() -> int | None:
    """What NVIDIA's driver counts as this process', its context and kernels included.

    None where it does not name the process: without NVML, or where processes have other numbers inside a container.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    processes = (_Process * 256)()
    gpu, count = ctypes.c_void_p(), ctypes.c_uint(len(processes))
    name = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
    if (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(gpu))
        or nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu, ctypes.byref(count), processes)
    ):
        return None
    used = {p.pid: p.used_bytes for p in processes[: count.value]}
    return used.get(os.getpid())


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )
