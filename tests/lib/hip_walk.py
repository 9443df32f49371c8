"""The HIP kernel's own source on a CPU: compiled by g++ over lib/hip_host, run as the CUDA kernel's (cuda_walk.py)."""

import torch

from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.hip.backend import HipBackend
from kog_triton.backends.hip.column_layout import lay_out_columns
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests import ROOT
from tests.lib.cuda_threads import ColumnThreadWalk, ThreadWalk
from tests.lib.cuda_walk import HERE, INCLUDE, ColumnBackend, FiberBackend, FiberKernel, compile_walk

HIP = ROOT / "backends/hip"
OWN = HIP / "include"
CALLS = {"decode": "kog::Pointers", "columns": "kog::Pointers", "stage": "kog::StageCall"}
ROUND_NS = 1000  # as the seam counts


def of_source(source, wave=64, own=OWN):
    """What an entry point, decode, columns or stage, is compiled with: flags for waves of so many threads; its text,
    and the folders that stand before CUDA's headers, HIP's `own` behind the seams."""
    flags = ("-O1", f"-DKOG_WAVE={wave}", f"-DENTRY=kog_{source}", f"-DCALL={CALLS[source]}")
    return flags, {"seams": (HERE.parent / "hip_host", HERE, own), "entry": (HIP / f"{source}.hip").read_text()}


def hip_walk(layout, *source, include=INCLUDE):
    """The shared library of an entry point, of other headers of CUDA's where some are given."""
    flags, texts = of_source(*source)
    return compile_walk(layout, flags, include, **texts)


class HipFiberKernel(FiberKernel):
    def compiled(self, include=INCLUDE, own=OWN):
        """`own`: where HIP's headers are."""
        return hip_walk(self.layout, *self.flags, own, include=include)


class HipFiberBackend(FiberBackend, HipBackend):
    """The HIP backend with the emulated GPU in place of a real one."""

    wave = 64

    def __init__(self, weights, options, num_blocks=2, seed=0, **columns):
        super().__init__(weights, options, num_blocks, seed, **columns)
        self.wait_ns *= ROUND_NS

    def _allocate(self, weights):
        return CudaBackend._allocate(self, weights)  # what other ranks write lies where all of it does

    def _make_columns(self, *what):
        return CudaBackend._make_columns(self, *what)

    def _open_devices(self):
        return [torch.device("cpu")] * self.num_devices, GPUS["mi300x"]

    def _load(self, source, entry, layout):
        return HipFiberKernel(layout, (source.removesuffix(".cu"), self.wave), self._seed)


class HipColumnBackend(HipFiberBackend, ColumnBackend):
    """With kernels of columns, compiled before a request comes."""


class HipThreadWalk(ThreadWalk):
    """The kernel of one token with a CPU thread for every block, under a judge."""

    source = "decode"

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **of_source(self.source)[1], **options)

    def _flags(self):
        return of_source(self.source)[0]

    def _lower(self, num_blocks):
        return lower_hip(build(self.spec), GPUS["mi300x"], num_blocks)

    def _lay_out(self, num_blocks):
        return lay_out_hip(self._lower(num_blocks), 64)


class HipColumnThreadWalk(HipThreadWalk, ColumnThreadWalk):
    """HipThreadWalk of a kernel of several columns."""

    source = "columns"

    def _lay_out(self, num_blocks):
        return lay_out_columns(self._lower(num_blocks), 64, self.columns)
