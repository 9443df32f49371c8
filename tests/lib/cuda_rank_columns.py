"""Kernels of columns on ranks, on a CPU: several requests a step, or positions of one prompt (cuda_ranks.py)."""

from dataclasses import replace

import numpy as np
import torch

from kog_triton.backends.cuda.layout.columns import lay_out_columns
from kog_triton.backends.cuda.layout.protocol import Word
from kog_triton.backends.request_words import encode
from kog_triton.backends.token_words import NUMBER_MASK, OUTCOME_SHIFT, Outcome
from tests.lib.cuda_ranks import ALL, RankThreadWalk, RankWalk
from tests.lib.cuda_threads import JUDGED
from tests.lib.cuda_walk import FLAGS, compile_walk


class RankColumnWalk(RankWalk):
    """RankWalk of a kernel of several columns: requests, or positions of one prompt if it is a `chunk`."""

    source = "columns.cu"

    def __init__(self, spec, weights, ranks, columns, num_blocks=0, chunk=False, **options):
        self.columns, self.chunk, self.slots = columns, chunk, 1 if chunk else columns
        super().__init__(spec, weights, ranks, num_blocks, **options)

    def _lay_out_ranks(self, lowering, max_context):
        return lay_out_columns(lowering, max_context, self.columns, self.chunk)

    def _compile(self, **changes):
        self.library = compile_walk(self.layout, FLAGS[self.source], **changes)

    def serve(self, requests, seed=0, limit=None):
        """What requests say and leave (`left_by`)."""
        self.write(requests)
        return self.go_on(requests, seed, limit)

    def write(self, requests):
        for m in self.ranks:
            for tensor in (m.cache, m.logprobs, m.outbox):
                tensor.zero_()
            for r in requests:
                m.write_request(r.slot, encode(r, self.spec.vocab_size), r.prompt, r.cached)

    def go_on(self, requests, seed=0, limit=None):
        """From launch to launch until they end, a prompt in chunks until its first token; or until a wait expires."""
        running = [r.slot for r in requests]
        while running:
            self.launch(running, seed, limit)
            if any(report[0] or report[8] for report in self.reports()):
                break
            ((outcome, _),) = self.endings()
            assert outcome not in (Outcome.RUNNING, Outcome.FAILED)
            running = [slot for slot in running if not self._is_done(slot)]
        return {r.slot: left_by(self, r.slot) for r in requests}

    def endings(self):
        """Outcome and last slot of the last launch, as the ranks tell them."""
        return {(int(m.mailbox[Word.OUTCOME]), int(m.mailbox[Word.SLOT])) for m in self.ranks}

    def launch(self, slots, seed=0, limit=None, absent=ALL, control=0):
        """Of requests that were written: what `_start` says. `control`: the host's word, to rank 0."""
        for m in self.ranks:
            for tensor in (m.words, m.error, m.mailbox):
                tensor.zero_()
        self.memory.mailbox[Word.CONTROL] = control
        cursors = slots * self.columns if self.chunk else slots
        return self._start(self._arguments(cursors, limit or self.limit), seed, absent)

    def _is_done(self, slot):
        words = self.memory.outbox[slot, :, 0]
        made = int((words != 0).sum())
        if self.chunk or made == 0:
            return made > 0
        return int(words[made - 1]) >> 32 + OUTCOME_SHIFT != Outcome.RUNNING


class RankColumnThreadWalk(RankColumnWalk, RankThreadWalk):
    """RankColumnWalk with a CPU thread for every block of every rank."""

    def __init__(self, spec, weights, ranks, columns, num_blocks, judge=JUDGED, **options):
        self._judge_flags = judge
        RankColumnWalk.__init__(self, spec, weights, ranks, columns, num_blocks, **options)

    def _compile(self, **changes):
        RankThreadWalk._compile(self, **changes)


def left_by(walk, slot):
    """What a request in a slot said, which all ranks agree on, its log-probabilities, each rank's keys and values."""
    said = [m.outbox[slot, :, 0].numpy() for m in walk.ranks]
    assert all(np.array_equal(said[0], other) for other in said)
    words = said[0][: int((said[0] != 0).sum())]
    assert [int(w) >> 32 & NUMBER_MASK for w in words] == list(range(1, len(words) + 1))
    tokens = [int(np.int32(np.uint32(int(w) & 0xFFFFFFFF))) for w in words]
    records = walk.memory.logprobs[slot, : len(words)].tolist()
    return tokens, records, [m.cache[slot].clone() for m in walk.ranks]


def alone_on_ranks(walk, requests):
    """What the same requests leave one by one on the kernel of one token."""
    found = {}
    for r in requests:
        for m in walk.ranks:
            for tensor in (m.cache, m.logprobs, m.outbox):
                tensor.zero_()
        words = encode(replace(r, slot=0), walk.spec.vocab_size)
        assert walk.run(words, r.prompt) > 0
        found[r.slot] = left_by(walk, 0)
    return found


def assert_same(found, expected):
    for slot, (tokens, records, caches) in expected.items():
        assert found[slot][:2] == (tokens, records)
        assert all(map(torch.equal, found[slot][2], caches))
