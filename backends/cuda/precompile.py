"""The kernel's compiler, begun from the model's spec and the driver's name of the GPU. No torch."""

import ctypes

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.jit import begin_cubin
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.errors import DeviceError
from kog_triton.model.spec import DTYPES, DType, ModelSpec
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu


def precompile(spec: ModelSpec, options: BackendOptions) -> None:
    """Begin to compile the kernel that `CudaBackend` will ask for, unless it would refuse the request; KogError
    for a model that has no layout, and without a known GPU or a compiler."""
    if options.dtype != "auto":
        spec = spec.replace(dtype=DTYPES[options.dtype])
    halves = spec.dtype is not DType.F32 and spec.kv_dtype in (None, spec.dtype)
    if options.num_gpus != 1 or not halves:
        return
    gpu = find_gpu(first_gpu())
    if not gpu.arch.startswith("sm_90") or options.device not in ("", "nvidia", gpu.name):
        return
    layout = lay_out(lower(build(spec), gpu), options.max_context or spec.max_context)
    begin_cubin(render(layout))


def first_gpu() -> str:
    """What the driver calls the GPU that torch will take; DeviceError if there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError("no CUDA driver") from error
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetName(name, len(name), device)
    ):
        raise DeviceError("the CUDA driver gives no GPU")
    return name.value.decode()
