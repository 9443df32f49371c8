"""Which kernels of prompts a model has, and their texts: of products, of unpacking, of what a pass of short prompts
runs between them, and of what brings module outputs from each GPU to all.

No torch: their compilers begin before it is imported (precompile.py), since the opening waits for all of them.
"""

from typing import NamedTuple

from kog_triton.backends.cuda.layout import rank_outputs
from kog_triton.backends.cuda.layout.prompt import ProductKernel, product_kernels, render_product, takes
from kog_triton.backends.cuda.layout.short_pass import (
    MOST_HEAD_DIM,
    MOST_HIDDEN,
    MOST_RANKS,
    QUERIES,
    SHORT_KERNELS,
    attend_bytes,
    render_short_pass,
)
from kog_triton.backends.cuda.layout.unpack import render_unpack, unpacked_stages
from kog_triton.model.spec import DType
from kog_triton.schedule.cuda import CudaLowering
from kog_triton.schedule.cuda_weights import StreamWeights
from kog_triton.schedule.lowering import layer_matrices

PRODUCTS, UNPACK = "prompt.cu", "unpack.cu"
SUMS_BYTES = 256  # shared memory of a kernel between products but attention: its warps' sums


class Function(NamedTuple):
    """One function of a pass: its header and source, its dynamic shared memory."""

    header: str
    source: str
    shared: int


def product_texts(lowering: CudaLowering) -> dict[ProductKernel | StreamWeights, tuple[str, str]]:
    """Headers and sources of the kernels of prompts' products, and of those that unpack narrow weights for them."""
    spec = lowering.schedule.spec
    texts: dict[ProductKernel | StreamWeights, tuple[str, str]] = {
        k: (render_product(k, spec.dtype), PRODUCTS) for k in product_kernels(lowering)
    }
    kinds = {lowering.weights[s.name] for s in unpacked_stages(lowering)}
    return texts | {kind: (render_unpack(kind, spec.dtype), UNPACK) for kind in kinds}


def can_pass(lowering: CudaLowering) -> bool:
    """Whether these kernels read the model: one lane, 16-bit matrices that prompt.cu reads, heads and streams that
    fit."""
    spec, schedule = lowering.schedule.spread, lowering.schedule
    matrices = layer_matrices(lowering.schedule)
    if lowering.schedule.spec.narrow:
        return False
    sizes = spec.head_dim % QUERIES == 0 and spec.head_dim <= MOST_HEAD_DIM
    sizes = sizes and spec.hidden_size % 4 == 0 and spec.hidden_size <= MOST_HIDDEN
    alone = spec.num_lanes == 1 and schedule.shards_per_rank == 1
    alone = alone and schedule.num_ranks <= MOST_RANKS
    return alone and sizes and all(takes(lowering, s) for s in matrices)


BETWEEN = ("kog_join", "kog_send", "kog_meet", "kog_heads", "kog_attend", "kog_gate")


def functions(dtype: DType) -> dict[tuple[ProductKernel, str], Function]:
    """All that passes launch, by kernel and name."""
    out = {}
    for kernel in SHORT_KERNELS:
        product = render_product(kernel, dtype, parts=True)
        out[kernel, "kog_product"] = Function(product, "prompt.cu", kernel.shared_bytes)
        between = render_short_pass(kernel.tokens, dtype)
        for name in BETWEEN:
            shared = attend_bytes(kernel.tokens) if name == "kog_attend" else SUMS_BYTES
            out[kernel, name] = Function(between, "short_pass.cu", shared)
    first = SHORT_KERNELS[0]  # what has no tokens is taken from the first pass's module
    out[first, "kog_place"] = Function(out[first, "kog_gate"].header, "short_pass.cu", 0)
    return out


class PromptKernels(NamedTuple):
    """Which kernels there are to be beside those of products, where they read the model: all, but where ranks share a
    GPU, or a CPU takes its place.

    short_passes  short prompts have a pass of their own
    rank_outputs  kernels bring module outputs of prompts' passes to all GPUs; else torch's copies do, and no pass is
                  short on several GPUs
    """

    short_passes: bool = True
    rank_outputs: bool = True

    def has_short(self, lowering: CudaLowering) -> bool:
        alone = lowering.schedule.num_ranks == 1
        return self.short_passes and (alone or self.rank_outputs) and can_pass(lowering)

    def has_outputs(self, lowering: CudaLowering) -> bool:
        several = lowering.schedule.num_ranks > 1
        return several and self.rank_outputs and rank_outputs.takes(lowering.schedule)


ALL = PromptKernels()


def outputs_text() -> tuple[str, str]:
    return rank_outputs.render_rank_outputs(), "rank_outputs.cu"


def prompt_texts(lowering: CudaLowering, kernels: PromptKernels) -> list[tuple[str, str]]:
    """Header and source of every kernel of prompts that a start begins."""
    texts = [*product_texts(lowering).values()]
    if kernels.has_short(lowering):
        between = functions(lowering.schedule.spec.dtype).values()
        texts += [(one.header, one.source) for one in between]
    if kernels.has_outputs(lowering):
        texts.append(outputs_text())
    return [*dict.fromkeys(texts)]
