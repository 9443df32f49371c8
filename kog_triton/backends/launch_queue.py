"""Engines of one process that share a GPU launch one after another, and a launch that may not last ends in time.

A kernel of requests fills its GPU until it ends: what another engine launches waits meanwhile, as long as a request
takes. So whoever launches waits in a line, and the first in it is told to leave at a token boundary once another engine
waits. Alone on a GPU whose driver lets kernels run, a request stays one launch.
"""

import ctypes
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch

QUANTUM_S = 0.05  # of a launch while another engine waits: the next launch costs 0.2 ms (CUDA's launcher.py)
# Of a launch where the driver kills kernels that last: Windows does after 2 s, unless told otherwise.
KILLED_S = 1.0
# After which an engine goes ahead of the line: it waits no longer for another's fault than the watchdog for a GPU's.
PATIENCE_S = 30.0
KERNEL_EXEC_TIMEOUT = 17  # CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT


class LaunchQueue:
    """First come, first served.

    longest_s  of a launch though nobody waits
    """

    def __init__(self, longest_s: float = math.inf) -> None:
        self._longest_s = longest_s
        self._line: deque[object] = deque()  # the first one may launch
        self._lock = threading.Condition()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Inside, the caller is first in line. Not to be nested."""
        me = object()
        try:
            with self._lock:
                self._line.append(me)
                self._lock.wait_for(lambda: self._line[0] is me, PATIENCE_S)  # Ctrl-C may end it
            yield
        finally:
            with self._lock, suppress(ValueError):  # of Ctrl-C ahead of the line
                self._line.remove(me)
                self._lock.notify_all()

    def over(self, seconds: float) -> bool:
        """Whether a launch that has gone on for so long is to leave."""
        return seconds > (QUANTUM_S if len(self._line) > 1 else self._longest_s)


class LaunchQueues:
    """The lines of several GPUs, for an engine that takes all of them at once. Each engine stands in line for one after
    another in the same order, so that no two wait for each other."""

    def __init__(self, queues: Sequence[LaunchQueue]) -> None:
        self._queues = queues

    @contextmanager
    def first(self) -> Iterator[None]:
        with ExitStack() as stack:
            for queue in self._queues:
                stack.enter_context(queue.first())
            yield

    def over(self, seconds: float) -> bool:
        return any(queue.over(seconds) for queue in self._queues)


_queues: dict[int, LaunchQueue] = {}  # by the index of the GPU
_lock = threading.Lock()


def queue_of(*devices: torch.device) -> LaunchQueue | LaunchQueues:
    """The one line of all engines on this GPU, or the lines of several; on a CPU, where nobody waits for another, a
    new one."""
    if devices[0].type != "cuda":
        return LaunchQueue()
    queues = [_queue(index) for index in sorted({_index(device) for device in devices})]
    return queues[0] if len(queues) == 1 else LaunchQueues(queues)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _queue(index: int) -> LaunchQueue:
    with _lock:
        if index not in _queues:
            _queues[index] = LaunchQueue(KILLED_S if kills_long_kernels(index) else math.inf)
        return _queues[index]


def kills_long_kernels(index: int) -> bool:
    """Whether the driver of an NVIDIA GPU ends kernels that last, as for one that drives a display."""
    if torch.version.hip:
        return False
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    device, says = ctypes.c_int(), ctypes.c_int()
    failed = cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetAttribute(
        ctypes.byref(says), KERNEL_EXEC_TIMEOUT, device
    )
    return not failed and says.value != 0
