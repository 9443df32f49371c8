"""Ranks of the CUDA kernel on a CPU: each has memory of its own, and its blocks run as fibers beside the others'."""

import ctypes

import torch

from kog_triton.backends.cuda.launcher import UNLIMITED
from kog_triton.backends.cuda.layout import layout
from kog_triton.backends.cuda.layout.names import STEPS
from kog_triton.backends.cuda.layout.protocol import TENSORS, RankPointers
from kog_triton.backends.cuda.rank_memory import allocate_ranks, rank_pointers
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.cuda_threads import JUDGED, ThreadWalk, thread_flags
from tests.lib.cuda_walk import HERE, INCLUDE, MOST, Walk, build_walk, compile_walk, write_request

ALL = slice(None)
LIMIT = 1 << 14  # rounds that a wait may take


class RankWalk(Walk):
    """One model on several emulated GPUs. `memory` is rank 0's, which tells the host."""

    source, limit, slots = "decode.cu", LIMIT, 1

    def __init__(self, spec, weights, ranks, num_blocks=0, max_context=64, include=INCLUDE, **changes):
        self.spec = spec
        lowering = lower(build(spec, ranks), GPUS["h200"], num_blocks)
        self.layout = self._lay_out_ranks(lowering, max_context)
        self._compile(include=include, **changes)
        cpus = [torch.device("cpu")] * ranks
        self.ranks = allocate_ranks(self.layout, weights, self.slots, cpus).each
        self.memory = self.ranks[0]
        self.most_steps = {}  # of a rank, if it is to leave earlier than the others

    def _lay_out_ranks(self, lowering, max_context):
        return layout.lay_out(lowering, max_context)

    def _compile(self, **changes):
        self.library = compile_walk(self.layout, **changes)

    def run(self, request, prompt, seed=0, limit=None, logits=None, absent=ALL, control=0):
        """Rounds that it took, or -1. `limit`: of a wait, the walk's own if none is given; `absent`: the rank that is
        never launched, or a slice of no rank."""
        arguments = self.arguments(request, prompt, limit or self.limit, logits, control)
        return self._start(arguments, seed, absent)

    def _start(self, arguments, seed, absent):
        blocks = self.layout.lowering.num_blocks
        left_out = (0, 0) if absent == ALL else (absent * blocks, blocks)
        return self.library.kog_run(ctypes.byref(arguments), seed, *left_out, ctypes.c_long(MOST))

    def arguments(self, request, prompt, limit, logits, control):
        others = {}
        for m in reversed(self.ranks):
            others = write_request(m, request, prompt, logits, control)
        return self._arguments([0], limit, **others)

    def _arguments(self, slots, limit, **others):
        count = len(self.ranks)
        each = (
            rank_pointers(self.ranks, r, slots, limit, self.most_steps.get(r, UNLIMITED), **others)
            for r in range(count)
        )
        return (RankPointers * count)(*each)

    def forward_logits(self, tokens, seed=0, limit=None):
        """Logits [tokens, vocab], every position; of each rank its own columns."""
        out = super().forward_logits(tokens, seed, limit or self.limit)
        assert all(int(m.mailbox[2]) == 2 for m in self.ranks)
        return out

    def reports(self):
        """What each rank noted of a wait that expired: flag, block, step, layer, word, seen, wanted, told, peer."""
        return [m.error.tolist() for m in self.ranks]

    def expired(self):
        """{rank: (layer, place)} of the waits that expired, behind a launch that all were made to leave. A rank
        without one was told by another, as any but the first to give up may be."""
        places = {}
        for rank, (flag, _, step, layer, word, _, _, told, peer) in enumerate(self.reports()):
            assert flag or peer, self.reports()
            if told:
                places[rank] = (layer, self.layout.place_of(STEPS[step], word))
        return places


class RankThreadWalk(RankWalk, ThreadWalk):
    """RankWalk with a CPU thread for every block of every rank; `limit` counts microseconds."""

    limit = 1 << 26

    def __init__(self, spec, weights, ranks, num_blocks, judge=JUDGED, **changes):
        self._judge_flags = judge
        super().__init__(spec, weights, ranks, num_blocks, **changes)

    def _compile(self, include=INCLUDE, **changes):
        flags = thread_flags(self._flags(), self._judge_flags)
        self.program = build_walk(self.layout, HERE / "threads.cpp", flags, include, **changes)

    def run(self, request, prompt, seed=0, limit=None, logits=None, absent=ALL, control=0):
        """1, or -1 if the blocks did not end; `verdict` says what else there is to say."""
        others = {} if logits is None else {"logits": logits}
        arguments = self.arguments(request, prompt, limit or self.limit, logits, control)
        return self._start(arguments, seed, absent, **others)

    def _start(self, arguments, seed, absent, **others):
        assert absent == ALL
        tensors = [{name: getattr(m, name) for name in TENSORS} | others for m in self.ranks]
        return self._judge_launch(arguments, tensors, seed)
