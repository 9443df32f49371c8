"""What the CUDA driver says of a GPU, through ctypes. No torch."""

import ctypes
import os

from kog_triton.errors import DeviceError
from kog_triton.schedule.topology import Seen

# CUdevice_attribute of cuda.h
SMS, MEMORY_CLOCK_KHZ, BUS_BITS, L2_BYTES = 16, 36, 37, 38
MAJOR, MINOR, SHARED_OPTIN = 75, 76, 97
# Capabilities whose machine code may have instructions of their own, of which the CUDA kernel is made: registers that
# warps hand over. Code for one runs on no other.
OWN_CODE = ((9, 0), (10, 0), (12, 0))


def read_gpu(index: int = 0) -> Seen:
    """Of the GPU that torch calls by this index; DeviceError without a driver or such a GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError("no CUDA driver") from error
    device, name, memory = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), index)
        or cuda.cuDeviceGetName(name, len(name), device)
        or cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    ):
        raise DeviceError("the CUDA driver gives no GPU")

    def ask(attribute: int) -> int:
        """0 for what this driver does not know."""
        value = ctypes.c_int()
        failed = cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        return 0 if failed else value.value

    return Seen(
        name.value.decode(),
        "nvidia",
        arch_of(ask(MAJOR), ask(MINOR)),
        ask(SMS),
        ask(SHARED_OPTIN),
        memory.value,
        ask(L2_BYTES),
        ask(MEMORY_CLOCK_KHZ) * 1e3,
        ask(BUS_BITS),
        percent=mps_percent(),
    )


def arch_of(major: int, minor: int) -> str:
    return f"sm_{major}{minor}" + "a" * ((major, minor) in OWN_CODE)


def mps_percent() -> float:
    """Of the GPU's multiprocessors, that MPS leaves this process: 100 where the environment asks for no share.

    A share that is asked for without MPS running is taken too: fewer blocks than could be, never more.
    """
    try:
        percent = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", ""))
    except ValueError:
        return 100
    return percent if 0 < percent < 100 else 100
