"""Module outputs of a prompt's pass between ranks of a CPU, by the kernels' own C++ (rank_outputs.cu)."""

import torch

from kog_triton.backends.cuda.layout.rank_outputs import CALLS, THREADS, render_rank_outputs
from kog_triton.backends.cuda.prompt_texts import PromptKernels
from kog_triton.backends.cuda.rank_outputs import PushedExchange
from tests.lib.cuda_walk import FiberBackend
from tests.lib.short_pass import _compiled, run

ROUNDS = 2000  # that a wait may take


def ready(rank, name, blocks, threads, call):
    assert threads == THREADS and isinstance(call, CALLS[name])
    kind = name.removeprefix("kog_").capitalize()
    library = _compiled("rank_outputs.cu", render_rank_outputs(), kind, name, THREADS, 256)
    return lambda stream: run(library, call, blocks)


def exchange_of(schedule):
    return PushedExchange(schedule, [torch.device("cpu")] * schedule.num_ranks, ready, ROUNDS)


class PushedBackend(FiberBackend):
    """FiberBackend whose prompts on several ranks are padded, and move their outputs by these kernels."""

    prompt_kernels = PromptKernels(short_passes=False)

    def _open_exchange(self, lowering):
        return exchange_of(lowering.schedule)
