"""How the entry points of one backend reach its GPU, or its GPUs: if they answer, in line with other
backends, on a stream of the backend's own on each.

On torch's default stream, which the process's other work shares, every other operation would wait for the end of a
request, and a request for every other operation.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from kog_triton.backends.launch_queue import queue_of
from kog_triton.backends.watchdog import Answers

_open: "weakref.WeakSet[GpuEntry]" = weakref.WeakSet()


class GpuEntry:
    """Of a backend on `devices`, the first of which is the current one. A CPU has no streams, and no two backends that
    share a `queue`."""

    def __init__(self, *devices: torch.device) -> None:
        self._has_gpu = devices[0].type == "cuda"
        self._answers, self.queue = Answers(), queue_of(*devices)
        gpus = devices if self._has_gpu else ()
        self._streams = [(device, torch.cuda.Stream(device)) for device in gpus]
        self._aside = [torch.cuda.Stream(device) for device in gpus]
        _open.add(self)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Inside, torch's current stream on each GPU is the backend's. What is queued there comes after what the
        caller's has been given by now, and before what that is given next."""
        pairs = [(own, torch.cuda.current_stream(device)) for device, own in self._streams]
        with ExitStack() as stack:
            for own, callers in reversed(pairs):  # the first one's GPU is the current one inside
                own.wait_stream(callers)
                stack.enter_context(torch.cuda.stream(own))
            yield
        for own, callers in pairs:
            callers.wait_stream(own)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, torch's current streams are others, which wait for nothing: to read what a launch has left that has
        ended, while the GPUs go on with what was queued behind it."""
        with ExitStack() as stack:
            for stream in reversed(self._aside):  # the first one's GPU is the current one inside
                stack.enter_context(torch.cuda.stream(stream))
            yield

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
        if not self._has_gpu:
            return
        if not any(other._has_gpu for other in _open):
            torch._C._cuda_clearCublasWorkspaces()  # which torch keeps a stream; another engine may be in its own
        torch.cuda.empty_cache()
