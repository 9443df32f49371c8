"""The code objects of a model, written to a folder for machines without a compiler (objects.py). Needs no GPU.

The command is kog_triton/prebuild.py: what opens checkpoints lies above backends.
"""

from collections.abc import Iterator
from pathlib import Path

from kog_triton.backends.cuda import kernel_cache
from kog_triton.backends.cuda.jit import compile_cubin
from kog_triton.backends.cuda.layout.collectives import check_count
from kog_triton.backends.cuda.layout.columns import COUNTS, POSITIONS, layout_of_chunks, layouts_of_slots
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.hip import rank_selftest, selftest, toolchain
from kog_triton.backends.hip.column_layout import lay_out_columns
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.backends.hip.objects import file_of
from kog_triton.model.small import CONTEXT, small_model
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.hip import asked_blocks, lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import Gpu


def sources(
    spec: ModelSpec, gpu: Gpu, max_context: int, num_gpus: int, num_blocks: int = 0
) -> Iterator[tuple[str, str]]:
    """Header and source of all that a start compiles: those of the tests of a GPU, which have the usual number of
    blocks, before the model's."""
    num_blocks = asked_blocks(build(spec, num_gpus), gpu, num_blocks)
    yield selftest.HEADER, "selftest.hip"
    if num_gpus > 1:
        yield rank_selftest.header(num_gpus), "rank_selftest.hip"
    small = small_model(spec, num_gpus=num_gpus)  # of the test of stages and requests
    if num_gpus > 1:
        yield _header(small, gpu, CONTEXT, 1), "decode.hip"
    yield _header(small, gpu, CONTEXT, 1), "stage.hip"
    for one, context, blocks in ((small, CONTEXT, 0), (spec, max_context, num_blocks)):
        yield _header(one, gpu, context, num_gpus, blocks), "decode.hip"
        for layout in column_layouts(one, gpu, context, num_gpus, blocks):
            yield render(layout), "columns.hip"


def _header(spec: ModelSpec, gpu: Gpu, context: int, num_gpus: int, num_blocks: int = 0) -> str:
    return render(lay_out_hip(lower_hip(build(spec, num_gpus), gpu, num_blocks), context))


def column_layouts(spec: ModelSpec, gpu: Gpu, max_context: int, num_gpus: int = 1, num_blocks: int = 0) -> list[Layout]:
    """Of prompts in chunks, and of all counts of requests that may share a step."""
    lowering = lower_hip(build(spec, num_gpus), gpu, num_blocks)
    chunks = layout_of_chunks(lowering, max_context, POSITIONS, lay_out_columns)
    columns = layouts_of_slots(lowering, max_context, COUNTS, COUNTS[-1], lay_out_columns)
    return [*([chunks] if chunks else []), *columns.values()]


def prebuild(
    folder: Path, spec: ModelSpec, gpu: Gpu, max_context: int = 0, num_gpus: int = 1, num_blocks: int = 0
) -> list[Path]:
    """The files that a start of this model needs, written; KogError for what the kernel cannot do."""
    check_count(num_gpus)
    written = []
    for header, source in sources(spec, gpu, max_context or spec.max_context, num_gpus, num_blocks):
        path = folder / file_of(header, source, gpu.arch)
        kernel_cache.write(path, compile_cubin(header, source, gpu.arch, tools=toolchain))
        written.append(path)
    return written
