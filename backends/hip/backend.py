"""HipBackend: the monokernel of one model on one AMD GPU.

The host's side is CudaBackend's, whose memory, words and serving the kernel shares (docs/HIP.md). What it has of its
own: the lowering, the compiler (toolchain.py) and the runtime (driver.py).
"""

from pathlib import Path

import torch

from kog_triton.backends import Availability, BackendOptions, WeightSource
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.device import gpu_of
from kog_triton.backends.hip.column_layout import lay_out_columns
from kog_triton.backends.hip.driver import HipKernel, count_gpus
from kog_triton.backends.hip.findings import look
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.backends.hip.objects import code_object, source_of_code
from kog_triton.backends.hip.prebuild import prebuild
from kog_triton.backends.hip.selftest import check_gpu
from kog_triton.backends.hip.toolchain import MI300
from kog_triton.backends.unseen_gpu import unseen_gpu
from kog_triton.errors import DeviceError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import Gpu

UNPROVEN = "it has never run on an AMD GPU"


class HipBackend(CudaBackend):
    name = "hip"
    vendors = ("amd",)
    rank = None  # type: ignore[assignment]  # "auto" does not take it
    prebuild = staticmethod(prebuild)
    lay_out_columns = staticmethod(lay_out_columns)
    early_kernels = False
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
            return Availability(
                False, f"{name} is {arch}, and it takes {MI300}", "choose --backend triton"
            )
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

    def __init__(self, weights: WeightSource, options: BackendOptions, num_blocks: int = 0) -> None:
        if options.num_gpus != 1:
            raise DeviceError("the hip backend runs on one GPU: choose --gpus 1")
        super().__init__(weights, options, num_blocks)

    def _open_devices(self) -> tuple[list[torch.device], Gpu]:
        """DeviceError, too, if the GPU does not pass the self-test."""
        device, gpu = self._find_gpu()
        check_gpu(device, gpu)
        return [device], gpu

    @classmethod
    def _find_gpu(cls) -> tuple[torch.device, Gpu]:
        device = torch.device("cuda", torch.cuda.current_device())
        gpu = gpu_of(device)
        assert gpu is not None
        return device, gpu

    @classmethod
    def xcds(cls) -> list[int]:
        """Of every block of a grid that fills the GPU. DeviceError as for `_open_devices`."""
        return check_gpu(*cls._find_gpu())

    def _lay_out(self, num_blocks: int) -> Layout:
        lowering = lower_hip(build(self.spec), self.gpu, num_blocks)
        check_lowering(lowering)
        return lay_out_hip(lowering, self.max_context)

    def _compile(self, source: str, layout: Layout) -> bytes:
        """Of the HIP source of the same name."""
        own, arch = Path(source).with_suffix(".hip").name, layout.lowering.gpu.arch
        return code_object(render(layout), own, arch)

    def _load(self, source: str, entry: str, layout: Layout) -> HipKernel:  # type: ignore[override]
        return HipKernel(self._code(source, layout), entry, layout.shared_bytes, self.devices[0])
