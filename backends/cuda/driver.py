"""The few calls of the CUDA driver that a cooperative launch takes, through ctypes.

Works in torch's context, which is the device's primary one and current once torch has touched the GPU.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from kog_triton.backends.device import Clock
from kog_triton.backends.resources import Resources
from kog_triton.errors import DeviceError

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES (without the dynamic part), _LOCAL_SIZE_BYTES, _NUM_REGS
STATIC_SHARED, LOCAL_BYTES, NUM_REGISTERS = 1, 3, 4

ALREADY_REACHED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED

EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: its value has 64 bytes, behind 4 that align it."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 6),  # of the grid, of a block
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


class Kernel:
    """One function of a cubin, with its dynamic shared memory set."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, device: torch.device) -> None:
        self._cuda = _library()
        self._shared, self._device = shared_bytes, device
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self._module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        self._call("cuFuncSetAttribute", self._function, MAX_DYNAMIC_SHARED, shared_bytes)

    def launch(self, blocks: int, threads: int, argument: ctypes.Structure) -> torch.cuda.Event:
        """Start all blocks at once, after what the current stream still does; the end as an event.

        DeviceError if they cannot all be resident.
        """
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
            self._call(
                "cuLaunchCooperativeKernel", self._function, blocks, 1, 1, threads, 1, 1,
                self._shared, ctypes.c_void_p(stream.cuda_stream), pointers,
            )  # fmt: skip
            finished = torch.cuda.Event()
            finished.record(stream)
            return finished

    def queued(self, blocks: int, threads: int, argument: ctypes.Structure) -> Callable[[int], None]:
        """What puts a launch on a stream, by its address, with `argument` as it then is. The launch may start before
        the last one there has ended: the kernel itself waits for it (include/kog/prompt/hopper.h)."""
        attribute = LaunchAttribute(EARLY)
        attribute.value[0] = 1
        sizes = (ctypes.c_uint * 6)(blocks, 1, 1, threads, 1, 1)
        config = LaunchConfig(sizes, self._shared, 0, ctypes.pointer(attribute), 1)
        # of a type that keeps `argument` alive
        pointers = (ctypes.POINTER(type(argument)) * 1)(ctypes.pointer(argument))
        cuda, function, where = self._cuda, self._function, ctypes.byref(config)

        def queue(stream: int) -> None:
            config.stream = stream
            call(cuda, "cuLaunchKernelEx", where, function, pointers, None)

        return queue

    def time(self, blocks: int, threads: int, argument: ctypes.Structure, before: Callable[[], None]) -> float:
        """Launch and wait for the end; seconds on the GPU from what `before` has queued to the end."""
        with torch.cuda.device(self._device):
            before()
            seconds = Clock(self._device)
            self.launch(blocks, threads, argument)
            return seconds()

    def resources(self) -> Resources:
        """Registers, local and shared memory, the dynamic part included."""

        def ask(attribute: int) -> int:
            value = ctypes.c_int()
            self._call("cuFuncGetAttribute", ctypes.byref(value), attribute, self._function)
            return value.value

        return Resources(ask(NUM_REGISTERS), ask(LOCAL_BYTES), ask(STATIC_SHARED) + self._shared)

    def close(self) -> None:
        with torch.cuda.device(self._device):  # whose context has the module
            self._call("cuModuleUnload", self._module)

    def _call(self, name: str, *arguments: Any) -> None:
        call(self._cuda, name, *arguments)


def call(cuda: Any, name: str, *arguments: Any, allowed: int = 0) -> None:
    """One call of the driver's; DeviceError with its words, unless it did well or the status is `allowed`."""
    status = getattr(cuda, name)(*arguments)
    if status and status != allowed:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(status, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown"
        raise DeviceError(f"{name}: CUDA error {status} ({reason})")


def reach(device: int, peer: int) -> None:
    """Let kernels on `device` read and write the memory of `peer`, until the process ends."""
    cuda, context = _library(), ctypes.c_void_p()
    call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), peer)
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # torch enters a device's context at its first use
        call(cuda, "cuCtxEnablePeerAccess", context, 0, allowed=ALREADY_REACHED)


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError("no CUDA driver: libcuda.so.1 is not there") from error
