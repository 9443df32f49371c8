"""The HIP backend's own source on an NVIDIA GPU, of full size: compiled by NVRTC over lib/hip_nvidia.

Its lowering and layout are of an MI300X with as many compute units as the GPU has, or fewer.
"""

from dataclasses import replace
from pathlib import Path

import torch

from kog_triton.backends import Availability
from kog_triton.backends.cuda import toolchain as cuda
from kog_triton.backends.cuda.backend import CudaBackend
from kog_triton.backends.cuda.jit import compile_cubin
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda_archs import HOPPER
from kog_triton.backends.hip.backend import HipBackend
from kog_triton.schedule.topology import GPUS
from tests import ROOT

HIP = ROOT / "backends/hip"
# The seam first, then HIP's headers in the place of CUDA's.
INCLUDES = (Path(__file__).with_suffix(""), HIP / "include", cuda.INCLUDE)


class Toolchain:
    """A Toolchain of cuda/jit.py."""

    FOLDER = HIP
    # matvec.h has a function that AMD's compilers take for either side.
    FLAGS = (*cuda.FLAGS, "-default-device", *(f"-I{folder}" for folder in INCLUDES))
    compiler_name = staticmethod(cuda.compiler_name)

    def flags_for(self, arch):
        return (*self.FLAGS, f"--gpu-architecture={arch}")

    def headers(self):
        return [path for folder in INCLUDES for path in sorted(folder.rglob("*.h"))]


def hip_cubin(layout, source):
    """Of an entry point, decode, columns or stage, for a Hopper GPU."""
    return compile_cubin(render(layout), f"{source}.hip", HOPPER, tools=Toolchain())


class HipOnNvidia(HipBackend):
    """With everything compiled before a request comes."""

    def __init__(self, weights, options, column_counts=(), positions=0):
        self.column_counts, self.chunk_positions = column_counts, positions
        super().__init__(weights, options)
        self.settle()

    @classmethod
    def availability(cls):
        return Availability(True)

    def _open_devices(self):
        device = torch.device("cuda", torch.cuda.current_device())
        there = torch.cuda.get_device_properties(device).multi_processor_count
        return [device], replace(GPUS["mi300x"], num_blocks=there // 8 * 8)

    def _compile(self, source, layout):
        return hip_cubin(layout, Path(source).stem)

    def _load(self, source, entry, layout):
        return CudaBackend._load(self, source, entry, layout)
