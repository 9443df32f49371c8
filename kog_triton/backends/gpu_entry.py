"""How the entry points of one backend reach its GPU: if it answers, in line with other
backends, on a stream of the backend's own.

On torch's default stream, which the process's other work shares, every other operation would wait for the end of a
request, and a request for every other operation.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kog_triton.backends.launch_queue import queue_of
from kog_triton.backends.watchdog import Answers

_open: "weakref.WeakSet[GpuEntry]" = weakref.WeakSet()


class GpuEntry:
    """Of a backend on `device`. A CPU has no streams, and no two backends that share a `queue`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._answers, self.queue = Answers(), queue_of(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        _open.add(self)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Inside, torch's current stream is the backend's. What is queued there comes after what the caller's has been
        given by now, and before what that is given next."""
        if self._stream is None:
            yield
            return
        callers = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(callers)
        with torch.cuda.stream(self._stream):
            yield
        callers.wait_stream(self._stream)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Around what is computed for one call. DeviceError if the GPU does not answer."""
        self._answers.check()
        with self.queue.first(), self.on_stream():
            yield

    @contextmanager
    def serving(self, free: Callable[[], None]) -> Iterator[None]:
        """Around requests, which wait in line themselves (serving.py). If they end in Stalled, `free` is called only
        when their kernel has ended."""
        with self._answers.serving(free), self.on_stream():
            yield

    def close(self, free: Callable[[], None]) -> None:
        """Free the backend's memory, unless a kernel may still write there, and give it back to the driver."""
        self._answers.close(free)
        _open.discard(self)
        if self.device.type != "cuda":
            return
        if not any(other.device.type == "cuda" for other in _open):
            torch._C._cuda_clearCublasWorkspaces()  # which torch keeps a stream; another engine may be in its own
        torch.cuda.empty_cache()
