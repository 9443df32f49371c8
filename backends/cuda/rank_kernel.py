"""A kernel on the GPUs of all ranks: loaded on each, one launch a GPU, ended when all have."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Structure
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kog_triton.backends.cuda.driver import Kernel
from kog_triton.backends.resources import Resources
from kog_triton.errors import DeviceError


class Finished(Protocol):
    """The end of a launch, as torch.cuda.Event says it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True)
class RankLaunch:
    """The end of one launch a GPU.

    missing  why a rank's kernel was not launched; the others leave once they have waited for it
    """

    ends: Sequence[Finished]
    missing: Mapping[int, str] = field(default_factory=dict)

    def query(self) -> bool:
        return all(end.query() for end in self.ends)

    def synchronize(self) -> None:
        for end in self.ends:
            end.synchronize()


def missing_of(launch: Finished | None) -> Mapping[int, str]:
    return launch.missing if isinstance(launch, RankLaunch) else {}


class RankKernel:
    """One function of a cubin on `devices`, a rank each."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._kernels = [self._open(cubin, name, shared_bytes, rank) for rank in range(len(devices))]

    def _open(self, cubin: bytes, name: str, shared_bytes: int, rank: int) -> Any:
        """The function on the GPU of a rank, with the methods of driver.py's Kernel."""
        device = self._devices[rank]
        with torch.cuda.device(device):  # whose context takes the module
            return Kernel(cubin, name, shared_bytes, device)

    def _meet(self) -> None:
        meet([torch.cuda.current_stream(device) for device in self._devices])

    def launch(self, blocks: int, threads: int, arguments: Sequence[Structure]) -> Finished:
        """Start all blocks of all ranks, each behind what the current streams of all GPUs still do: no rank's kernel
        writes words that another's stream has yet to empty. DeviceError if one GPU's cannot all be resident."""
        if len(self._kernels) == 1:
            one: Finished = self._kernels[0].launch(blocks, threads, arguments[0])
            return one
        self._meet()
        ends: list[Finished] = []
        missing = {}
        for rank, (kernel, argument) in enumerate(zip(self._kernels, arguments, strict=True)):
            try:
                ends.append(kernel.launch(blocks, threads, argument))
            except DeviceError as error:
                missing[rank] = str(error)
        return RankLaunch(ends, missing)

    def time(self, blocks: int, threads: int, argument: Structure, before: Callable[[], None]) -> float:
        """As `Kernel.time`, on the first GPU."""
        seconds: float = self._kernels[0].time(blocks, threads, argument, before)
        return seconds

    def resources(self) -> Resources:
        """Of one GPU's."""
        taken: Resources = self._kernels[0].resources()
        return taken

    def close(self) -> None:
        for kernel in self._kernels:
            kernel.close()


def meet(streams: Sequence[torch.cuda.Stream]) -> None:
    """What comes next on any of the streams waits for what all of them have been given by now."""
    for stream, event in [(stream, stream.record_event()) for stream in streams]:
        for other in streams:
            if other is not stream:
                other.wait_event(event)
