"""The kernel's compiler, begun from the model's spec and what the driver says of the GPU. No torch."""

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.jit import begin_cubin
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import lay_out
from kog_triton.backends.cuda.toolchain import HOPPER
from kog_triton.backends.nvidia_driver import read_gpu
from kog_triton.model.spec import DTYPES, DType, ModelSpec
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import describe


def precompile(spec: ModelSpec, options: BackendOptions) -> None:
    """Begin to compile the kernel that `CudaBackend` will ask for, unless it would refuse the request; KogError
    for a model that has no layout, and without a known GPU or a compiler."""
    if options.dtype != "auto":
        spec = spec.replace(dtype=DTYPES[options.dtype])
    halves = spec.dtype is not DType.F32 and spec.kv_dtype in (None, spec.dtype)
    if not halves or spec.narrow:
        return
    gpu = describe(read_gpu())
    if gpu.arch != HOPPER or options.device not in ("", "nvidia", gpu.name):
        return
    layout = lay_out(
        lower(build(spec, options.num_gpus), gpu), options.max_context or spec.max_context
    )
    begin_cubin(render(layout), arch=gpu.arch)
