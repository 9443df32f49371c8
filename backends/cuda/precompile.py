"""The kernels' compilers, begun from the model's spec and what the driver says of the GPU. No torch."""

import os

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.deep import deep_layout
from kog_triton.backends.cuda.early import tokens_only
from kog_triton.backends.cuda.jit import begin_cubin
from kog_triton.backends.cuda.layout.columns import COUNTS, POSITIONS, layout_of_chunks, layouts_of_slots
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout, lay_out
from kog_triton.backends.cuda.prompt_texts import ALL, prompt_texts
from kog_triton.backends.cuda_archs import HOPPER
from kog_triton.backends.nvidia_driver import read_gpu
from kog_triton.model.spec import DTYPES, DType, ModelSpec
from kog_triton.schedule.cuda import CudaLowering, lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import describe

LIBRARY = ("auto", "library")  # ways of prompts that may be the library's


def precompile(spec: ModelSpec, options: BackendOptions) -> None:
    """Begin to compile the kernels that `CudaBackend` will ask for, those that its opening waits for first, unless it
    would refuse the request; KogError for a model that has no layout, and without a known GPU or a compiler."""
    if options.dtype != "auto":
        spec = spec.replace(dtype=DTYPES[options.dtype])
    halves = spec.dtype is not DType.F32 and spec.kv_dtype in (None, spec.dtype)
    if not halves or spec.narrow:
        return
    gpu = describe(read_gpu())
    if gpu.arch != HOPPER or options.device not in ("", "nvidia", gpu.name):
        return
    lowering = lower(build(spec, options.num_gpus), gpu)
    for header, source in _in_order(lowering, options):
        begin_cubin(header, source, gpu.arch)


def _in_order(lowering: CudaLowering, options: BackendOptions) -> list[tuple[str, str]]:
    """Headers and sources to begin. An opening waits for early kernels and those of prompts; kernels of several
    requests take longest, and begin ahead of prompts' where at least half of the cores are left to those
    (benchmarks/cuda-log.md#early). Where there are no early ones, as many kernels as leave Python a core, which imports
    meanwhile."""
    cores = len(os.sched_getaffinity(0))
    early, whole, several, deep = (
        [(render(layout), source) for source, layout in kernels] for kernels in _kernels(lowering, options)
    )
    if not early:
        return [*whole, *several, *deep][: max(1, cores - 1)]
    prompts = prompt_texts(lowering, ALL) if options.prefill in LIBRARY else []
    if len(early) + len(several) <= cores // 2:
        return [*early, *several, *prompts, *whole, *deep]
    return [*early, *prompts, *whole, *several, *deep]


Kernels = list[tuple[str, Layout]]  # sources with their layouts


def _kernels(lowering: CudaLowering, options: BackendOptions) -> tuple[Kernels, ...]:
    """Of one token, the early ones and the whole; of several, those that take longest first; of deep positions."""
    max_context = options.max_context or lowering.schedule.spec.max_context
    layout = lay_out(lowering, max_context)
    sources = ["decode.cu"]
    if options.prefill in LIBRARY:
        sources.append("head_steps.cu")
    soon = [(source, tokens_only(source, layout)) for source in sources]
    early = [(source, one) for source, one in soon if one is not None]
    several = []
    if options.prefill in ("auto", "kernel"):
        chunks = layout_of_chunks(lowering, max_context, POSITIONS)
        several += [chunks] if chunks else []
    columns = layouts_of_slots(lowering, max_context, COUNTS, options.num_slots)
    several += [columns[count] for count in sorted(columns, reverse=True)]
    whole = [(source, layout) for source in sources]
    deep = deep_layout(layout)
    of_deep = [("decode.cu", deep)] if deep else []
    return early, whole, [("columns.cu", layout) for layout in several], of_deep
