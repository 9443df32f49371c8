"""HipBackend: the monokernel of one model on one AMD GPU, or a rank of it on each of several.

The host's side is CudaBackend's, whose memory, words and serving the kernel shares (docs/HIP.md). What it has of its
own: the lowering, the compiler (toolchain.py) and the runtime (driver.py).
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from kog_triton.backends import Availability, BackendOptions, WeightSource
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.columns import ColumnKernel
from kog_triton.backends.cuda.gpus import check_alike
from kog_triton.backends.cuda.layout.collectives import check_count
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.rank_kernel import RankKernel
from kog_triton.backends.cuda.rank_memory import Ranks
from kog_triton.backends.device import gpu_of
from kog_triton.backends.hip.column_layout import lay_out_columns
from kog_triton.backends.hip.driver import HipRankKernel, count_gpus, number_of
from kog_triton.backends.hip.findings import look
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.backends.hip.objects import code_object, source_of_code
from kog_triton.backends.hip.peers import check_peers, reach_all, uncached
from kog_triton.backends.hip.prebuild import prebuild
from kog_triton.backends.hip.rank_selftest import check_ranks
from kog_triton.backends.hip.selftest import check_gpu
from kog_triton.backends.hip.toolchain import MI300
from kog_triton.backends.unseen_gpu import unseen_gpu
from kog_triton.errors import DeviceError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.hip import asked_blocks, lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import Gpu

log = logging.getLogger(__name__)
UNPROVEN = "it has never run on an AMD GPU"


def _gpu(device: torch.device) -> Gpu:
    gpu = gpu_of(device)
    if gpu is None:
        raise DeviceError(f"{device} is not a GPU that torch describes")
    return gpu


class HipBackend(CudaBackend):
    name = "hip"
    vendors = ("amd",)
    rank = None  # type: ignore[assignment]  # "auto" does not take it
    prebuild, check_count = staticmethod(prebuild), staticmethod(check_count)
    lay_out, lay_out_columns = staticmethod(lay_out_hip), staticmethod(lay_out_columns)
    early_kernels = deep_kernel = False
    profile = None  # type: ignore[assignment]  # and none that takes stamps

    @classmethod
    def availability(cls) -> Availability:
        try:
            name, arch = cls._gpu_here()
        except DeviceError as error:
            gpu = unseen_gpu()
            if gpu is not None and gpu.arch == MI300:
                return Availability(False, gpu.reason, gpu.advice, lacks_software=True)
            return Availability(False, str(error), "run on a machine with an MI300X")
        if arch != MI300:
            return Availability(False, f"{name} is {arch}, and it takes {MI300}", "choose --backend triton")
        try:
            count_gpus()
            source_of_code()
        except DeviceError as error:
            reason, _, advice = str(error).partition("; ")
            return Availability(False, reason, advice, lacks_software=True)
        return Availability(True, by_name_only=UNPROVEN)

    @classmethod
    def _gpu_here(cls) -> tuple[str, str]:
        """Name and architecture of the current GPU; DeviceError where torch sees no AMD GPU."""
        if not torch.cuda.is_available() or not torch.version.hip:
            raise DeviceError("torch sees no AMD GPU")
        of = torch.cuda.get_device_properties()
        return of.name, of.gcnArchName.split(":")[0]

    @classmethod
    def findings(cls) -> dict[str, str]:
        """For `kog doctor`."""
        return look(cls.availability(), cls.xcds)

    @classmethod
    def why_not_narrow(cls, spec: ModelSpec) -> str:
        return f"its kernel reads 16-bit weights, and these are {spec.narrow_formats}"

    @classmethod
    def check_blocks(cls, spec: ModelSpec, options: BackendOptions) -> None:
        """Ahead of all that a start compiles and tests."""
        schedule = build(spec, options.num_gpus)
        asked_blocks(schedule, cls._find_gpus()[0][1], options.num_blocks)

    def _open_devices(self) -> tuple[list[torch.device], Gpu]:
        """DeviceError, too, if a GPU does not pass its self-test, or several the one of what is between them."""
        count = self.num_devices
        if count > 1:
            check_peers(count)
        found = self._find_gpus(count)
        check_alike([gpu for _, gpu in found])
        for rank, (device, gpu) in enumerate(found):
            check_gpu(device, gpu, rank)
        devices, gpu = [device for device, _ in found], found[0][1]
        if count > 1:
            reach_all(count)
            check_ranks(tuple(devices), gpu)
        return devices, gpu

    @classmethod
    def _find_gpus(cls, count: int = 1) -> list[tuple[torch.device, Gpu]]:
        """The current GPU, or the first `count`. DeviceError names one that is not there."""
        numbers = range(count) if count > 1 else [torch.cuda.current_device()]
        devices = [torch.device("cuda", number) for number in numbers]
        return [(device, _gpu(device)) for device in devices]

    @classmethod
    def xcds(cls) -> list[int]:
        """Of every block of a grid that fills the GPU. DeviceError as for `_open_devices`."""
        return check_gpu(*cls._find_gpus()[0])

    def _lay_out(self, num_blocks: int) -> Layout:
        schedule = build(self.spec, self.num_devices)
        asked = asked_blocks(schedule, self.gpu, self.options.num_blocks)
        lowering = lower_hip(schedule, self.gpu, num_blocks or asked)
        check_lowering(lowering)
        return self.lay_out(lowering, self.max_context)

    def _compile(self, source: str, layout: Layout) -> bytes:
        """Of the HIP source of the same name."""
        own, arch = Path(source).with_suffix(".hip").name, layout.lowering.gpu.arch
        return code_object(render(layout), own, arch)

    def _load(self, source: str, entry: str, layout: Layout) -> HipRankKernel:
        code = self._code(source, layout)
        kernel = HipRankKernel(code, entry, layout.shared_bytes, self.devices)
        # No refusal: tokens are right all the same, and who has one compiler has no other kernel.
        if scratch := kernel.resources().local_bytes:
            name = Path(source).stem
            told = "%s.hip has %d bytes of scratch memory a thread, and may be slow: %s"
            log.warning(told, name, scratch, source_of_code())
        return kernel

    def _allocate(self, weights: WeightSource) -> Ranks:
        """Of several ranks what the others write is where all see it."""
        ranks = super()._allocate(weights)
        if self.num_devices == 1:
            return ranks

        def seen_by_all(rank: int) -> dict[str, torch.Tensor]:
            memory = ranks.each[rank]
            sizes = {"words": len(memory.words), "error": len(memory.error)}
            return {name: self._seen_by_all(size, rank) for name, size in sizes.items()}

        return ranks.changed(seen_by_all)

    def _make_columns(self, layout: Layout, kernel: RankKernel, devices: Sequence[torch.device]) -> ColumnKernel:
        """As `_allocate`."""
        made = super()._make_columns(layout, kernel, devices)
        if len(devices) == 1:
            return made
        words = [self._seen_by_all(layout.total_words, rank) for rank in range(len(devices))]
        return replace(made, words=words)

    def _seen_by_all(self, count: int, rank: int) -> torch.Tensor:
        device = self.devices[rank]
        return uncached(count, device, number_of(device, rank))
