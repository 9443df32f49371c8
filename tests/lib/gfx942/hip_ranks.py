"""The HIP kernel on several simulated GPUs: a rank each, whose words all others write (docs/SYNC.md)."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kog_triton.backends.cuda.launcher import UNLIMITED
from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.protocol import TENSORS, Pointers
from kog_triton.backends.cuda.memory import Memory
from kog_triton.backends.cuda.rank_memory import allocate_ranks, rank_pointers
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.model.spec import Head, ModelSpec, Reduce
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.cuda_walk import write_request
from tests.lib.gfx942.executor import SYSTEM, Buffer, Execution, Kernel, Launch
from tests.lib.gfx942.hip_kernel import INCLUDES, KERNEL, LEAST, PAIRS, UNLIMITED_NS, WAVE, HipWalk, compiled
from tests.lib.gfx942.requests import ASKED, reference_tokens
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.triton_cases import lanes, plain

SPECS = {"llama": plain(2), "laneformer": lanes((Reduce.OWN, Reduce.DELAYED), 1, Head.VOCAB_PARALLEL, lane_norms=True)}
BLOCKS = 4  # of a GPU
NAMES = {"llama": ("greedy", "edits", "rules"), "laneformer": ("sampled", "greedy", "edits")}
# Of several ranks the others write a rank's words, and say that they leave.
SHARED = LEAST | {"words": SYSTEM, "error": SYSTEM}


class HipRankWalk(HipWalk):
    """One model on `ranks` GPUs; `memory` is the first one's, which tells the host. Ranks in `absent` never come."""

    absent: tuple[int, ...] = ()

    def __init__(
        self,
        spec: ModelSpec,
        weights: Any,
        ranks: int,
        num_blocks: int = 0,
        max_context: int = 64,
        includes: Any = INCLUDES,
    ) -> None:
        self.spec = spec
        self.layout = lay_out_hip(lower_hip(build(spec, ranks), GPUS["mi300x"], num_blocks), max_context)
        self.kernel = Kernel(compiled(render(self.layout), includes), KERNEL)
        self.ranks = allocate_ranks(self.layout, weights, 1, [torch.device("cpu")] * ranks).each
        self.memory = self.ranks[0]
        self.conditions = {}
        self.last = None

    def run(self, request, prompt, seed=0, limit=UNLIMITED_NS, logits=None, control=0):  # type: ignore[no-untyped-def]
        for m in reversed(self.ranks):
            others = write_request(m, request, prompt, logits, control)
        pointers = {
            r: rank_pointers(self.ranks, r, [0], limit, UNLIMITED, **others)
            for r in range(len(self.ranks))
            if r not in self.absent
        }
        self.last = launch_ranks(self.kernel, self.layout, self.ranks, pointers, others, seed=seed, **self.conditions)
        return self.last.steps


def launch_ranks(
    kernel: Kernel,
    layout: Layout,
    ranks: Sequence[Memory],
    pointers: Mapping[int, Pointers],
    others: Mapping[str, torch.Tensor] = MappingProxyType({}),
    **conditions: Any,
) -> Execution:
    """One launch of the ranks in `pointers`, beside each other."""
    grid, block = (layout.lowering.num_blocks, 1, 1), (WAVE, layout.threads // WAVE, 1)
    launches = [Launch([bytes(one)], grid, block, rank) for rank, one in pointers.items()]
    tensors = {
        t.data_ptr(): (name, t)
        for m in ranks
        for name, t in ({n: getattr(m, n) for n in TENSORS} | {**others}).items()
        if t.numel()
    }
    buffers = [Buffer(t, SHARED.get(n) == SYSTEM, SHARED.get(n, 0), n in PAIRS) for n, t in tensors.values()]
    return kernel.run(launches, buffers, lds=layout.shared_bytes, **conditions)


@cache
def walk(case: str, includes: tuple[Path, ...] = INCLUDES) -> HipRankWalk:
    """The kernel's machine code for a model of SPECS on two simulated GPUs, a rank each."""
    return HipRankWalk(SPECS[case], ArrayWeights(SPECS[case]), 2, BLOCKS, includes=includes)


def asked() -> Iterator[tuple[str, str, list[int]]]:
    """Case, request and the reference's tokens."""
    for case, names in NAMES.items():
        for name in names:
            yield case, name, reference_tokens(SPECS[case], ASKED[name])
