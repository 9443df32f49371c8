"""GPUs of one process that reach each other's memory over xGMI, and memory whose words all of them see.

Memory of torch's may stay in the L2 of the GPU that has it, where no other GPU's stores arrive while a kernel runs:
AMD has system scope act as the GPU's own there. So what ranks tell each other lies in memory that nobody caches.
"""

import ctypes
from itertools import permutations

import numpy as np
import torch

from kog_triton.backends.cuda.layout.collectives import check_count
from kog_triton.backends.hip.driver import call, count_gpus, load_library, on_gpu
from kog_triton.errors import DeviceError

UNCACHED = 3  # hipDeviceMallocUncached
ALREADY_REACHED = 704  # hipErrorPeerAccessAlreadyEnabled


def check_peers(count: int) -> None:
    """DeviceError unless the first `count` GPUs are there and reach each other's memory."""
    check_count(count)
    there = count_gpus()
    if there < count:
        raise DeviceError(f"{count} GPUs were asked for, and HIP sees {there}")
    hip, can = load_library(), ctypes.c_int()
    for gpu, peer in permutations(range(count), 2):
        call(hip, "hipDeviceCanAccessPeer", ctypes.byref(can), gpu, peer)
        if not can.value:
            raise DeviceError(
                f"GPU {gpu} does not reach the memory of GPU {peer}: choose GPUs that xGMI joins "
                "(HIP_VISIBLE_DEVICES; rocm-smi --showtopo)"
            )


def reach_all(count: int) -> None:
    """Let kernels on each of the first `count` GPUs read and write the others' memory, until the process ends."""
    hip = load_library()
    for gpu, peer in permutations(range(count), 2):
        with on_gpu(hip, gpu):
            call(hip, "hipDeviceEnablePeerAccess", peer, 0, allowed=ALREADY_REACHED)


class _Uncached:
    """Memory of a GPU that is freed with the last tensor that lies there, for which numpy and torch keep this."""

    def __init__(self, count: int, device: torch.device, number: int) -> None:
        self._hip, self.address = load_library(), ctypes.c_void_p()
        size = ctypes.c_size_t(4 * count)
        with on_gpu(self._hip, number):
            where = ctypes.byref(self.address)
            call(self._hip, "hipExtMallocWithFlags", where, size, UNCACHED)
        interface = {"shape": (count,), "typestr": "<i4", "data": (self.address.value, False), "version": 3}
        if device.type == "cuda":
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface

    def __del__(self) -> None:
        if self.address and self._hip.hipFree(self.address):
            self._hip.hipGetLastError()  # as `call` does, which raises


def uncached(count: int, device: torch.device, number: int) -> torch.Tensor:
    """int32 [count], zero, which every GPU that reaches this one sees as it is. DeviceError if there is none."""
    memory = _Uncached(count, device, number)
    on_cpu = device.type != "cuda"
    tensor = torch.as_tensor(np.asarray(memory) if on_cpu else memory, device=device)
    if tensor.data_ptr() != memory.address.value:
        raise DeviceError("torch makes a copy of memory that all GPUs see: choose --gpus 1, and report this")
    return tensor.zero_()
