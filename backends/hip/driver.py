"""The few calls of the HIP runtime (libamdhip64) that a cooperative launch takes, through ctypes.

Works on torch's current stream of a GPU: a ROCm build of torch has loaded the runtime, and its copy is the one that is
called. GPUs have the runtime's numbers, which are torch's. Every return code is looked at; an error has the code's
name, HIP's words and the call.
"""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kog_triton.backends.cuda.rank_kernel import Finished, RankKernel
from kog_triton.backends.resources import Resources
from kog_triton.errors import DeviceError

SONAME = "libamdhip64.so"
MAJORS = (7, 6)  # of ROCm's releases
WAVE = 64
OUT_OF_MEMORY, INVALID_IMAGE, NO_BINARY, NOT_READY = 2, 200, 209, 600  # hipError_t
TOO_LARGE = 720  # hipErrorCooperativeLaunchTooLarge
ADVICE = {
    OUT_OF_MEMORY: "another process may hold the GPU's memory (rocm-smi shows whose)",
    INVALID_IMAGE: "the runtime may be older than the compiler: take one of the same ROCm (ROCM_PATH), for "
    "KOG_HIP_OBJECTS too",
    NO_BINARY: "the code object is for another GPU",
    TOO_LARGE: "another process may hold compute units (rocm-smi shows whose)",
}
# hipFunction_attribute: static LDS, scratch of a thread, registers
STATIC_SHARED, LOCAL_BYTES, NUM_REGISTERS = 1, 3, 4


def find_library() -> str | None:
    """What the loader is to open: the copy that torch has loaded, a soname that it knows, or the file in ROCM_PATH;
    None where there is none."""
    rocm = os.environ.get("ROCM_PATH") or "/opt/rocm"
    names = [*(f"{SONAME}.{major}" for major in MAJORS), SONAME]
    places = [*names, *(str(Path(rocm, "lib", name)) for name in reversed(names))]
    if torch.version.hip:
        places.insert(0, str(Path(torch.__file__).parent / "lib" / SONAME))
    for place in places:
        try:
            ctypes.CDLL(place)
        except OSError:
            continue
        return place
    return None


def load_library() -> ctypes.CDLL:
    """DeviceError if it is not there."""
    place = find_library()
    if place is None:
        raise DeviceError(f"no HIP runtime: {SONAME} is not there; install ROCm, or set ROCM_PATH to where it lies")
    hip = ctypes.CDLL(place)
    for name in ("hipGetErrorName", "hipGetErrorString"):
        getattr(hip, name).restype = ctypes.c_char_p
    return hip


def count_gpus() -> int:
    """DeviceError without the runtime, or if that finds none."""
    count = ctypes.c_int()
    call(load_library(), "hipGetDeviceCount", ctypes.byref(count))
    return count.value


def call(hip: Any, name: str, *arguments: Any, allowed: int = 0) -> int:
    """One call of the runtime; its status, or DeviceError unless it did well or the status is `allowed`."""
    status = int(getattr(hip, name)(*arguments))
    if status:
        # Since ROCm 7 it stays as the thread's last error, and torch raises that as its own next launch's.
        hip.hipGetLastError()
    if status in (0, allowed):
        return status
    code = (hip.hipGetErrorName(status) or b"an unknown error").decode()
    words = (hip.hipGetErrorString(status) or b"").decode()
    advice = f"; {ADVICE[status]}" if status in ADVICE else ""
    raise DeviceError(f"{name}: {code} ({status}, {words}){advice}")


@contextmanager
def on_gpu(hip: Any, number: int) -> Iterator[None]:
    """Inside, what this thread asks of the runtime is of this GPU."""
    before = ctypes.c_int()
    call(hip, "hipGetDevice", ctypes.byref(before))
    call(hip, "hipSetDevice", number)
    try:
        yield
    finally:
        call(hip, "hipSetDevice", before.value)


class Event:
    """A point in a stream, once it is recorded; torch.cuda.Event's methods."""

    def __init__(self, hip: Any) -> None:
        self._hip, self._event = hip, ctypes.c_void_p()
        call(hip, "hipEventCreate", ctypes.byref(self._event))

    def record(self, stream: ctypes.c_void_p) -> None:
        call(self._hip, "hipEventRecord", self._event, stream)

    def query(self) -> bool:
        """Whether all before it has ended; DeviceError if that broke off."""
        return call(self._hip, "hipEventQuery", self._event, allowed=NOT_READY) != NOT_READY

    def synchronize(self) -> None:
        call(self._hip, "hipEventSynchronize", self._event)

    def __del__(self) -> None:
        if self._event and self._hip.hipEventDestroy(self._event):
            self._hip.hipGetLastError()  # as `call` does, which raises


class Unmarked:
    """The end of a launch behind which a call failed, as the end of its stream; what failed is raised then, and not
    while a kernel runs that would count as none."""

    def __init__(self, hip: Any, number: int, stream: ctypes.c_void_p, why: str) -> None:
        self._hip, self._number, self._stream, self._why = hip, number, stream, why

    def query(self) -> bool:
        with on_gpu(self._hip, self._number):
            status = call(self._hip, "hipStreamQuery", self._stream, allowed=NOT_READY)
        if status == NOT_READY:
            return False
        raise DeviceError(self._why)

    def synchronize(self) -> None:
        with on_gpu(self._hip, self._number):
            call(self._hip, "hipStreamSynchronize", self._stream)
        raise DeviceError(self._why)


class HipKernel:
    """One function of a code object on one GPU, launched in waves of 64: the methods of cuda/driver.py's Kernel."""

    def __init__(self, code_object: bytes, name: str, shared_bytes: int, device: torch.device, number: int) -> None:
        self._hip, self._shared, self._device = load_library(), shared_bytes, device
        self._number = number
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("hipModuleLoadData", ctypes.byref(self._module), code_object)
        self._call("hipModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())

    def launch(self, blocks: int, threads: int, argument: ctypes.Structure) -> Finished:
        """Start all blocks at once, after what the current stream still does; the end as an event.

        DeviceError if they cannot all be resident; nothing is launched then.
        """
        stream = ctypes.c_void_p(
            torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else None
        )
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        launched = False
        try:
            with on_gpu(self._hip, self._number):
                end = Event(self._hip)
                call(
                    self._hip, "hipModuleLaunchCooperativeKernel", self._function, blocks, 1, 1, WAVE, threads // WAVE,
                    1, self._shared, stream, pointers,
                )  # fmt: skip
                launched = True
                end.record(stream)
        except DeviceError as error:
            if not launched:
                raise
            return Unmarked(self._hip, self._number, stream, str(error))
        return end

    def time(self, blocks: int, threads: int, argument: ctypes.Structure, before: Callable[[], None]) -> float:
        """Launch and wait for the end; seconds by the host's clock, from the end of what `before` has queued."""
        before()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begun = time.perf_counter()
        self.launch(blocks, threads, argument).synchronize()
        return time.perf_counter() - begun

    def resources(self) -> Resources:
        """Registers, scratch and LDS, the dynamic part included."""

        def ask(attribute: int) -> int:
            value = ctypes.c_int()
            self._call("hipFuncGetAttribute", ctypes.byref(value), attribute, self._function)
            return value.value

        return Resources(ask(NUM_REGISTERS), ask(LOCAL_BYTES), ask(STATIC_SHARED) + self._shared)

    def close(self) -> None:
        self._call("hipModuleUnload", self._module)

    def _call(self, name: str, *arguments: Any) -> None:
        with on_gpu(self._hip, self._number):  # which has the module
            call(self._hip, name, *arguments)


class HipRankKernel(RankKernel):
    """One function of a code object on `devices`, a rank each. Devices of a CPU stand for the first GPUs."""

    def _open(self, cubin: bytes, name: str, shared_bytes: int, rank: int) -> HipKernel:
        device = self._devices[rank]
        return HipKernel(cubin, name, shared_bytes, device, number_of(device, rank))

    def _meet(self) -> None:
        if self._devices[0].type == "cuda":
            super()._meet()


def number_of(device: torch.device, rank: int) -> int:
    """The runtime's number of a rank's GPU."""
    return rank if device.index is None else device.index
