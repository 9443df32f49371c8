"""Launches of the CUDA kernels for requests (kog_triton/backends/serving.py): which kernel serves whom.

A launch serves one request; several in token columns, a token of each a step; or, where a model has no such
kernel or it is still being compiled, several round robin, a token each. It ends when one of them does. A prompt
goes first, alone and in chunks (chunks.py), while the others wait. Ahead of all that requests whose prompt the library
has run get their first tokens, by the head alone, whoever is beside them.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kog_triton.backends.cuda.chunks import MOST_CHUNKS, Chunks
from kog_triton.backends.cuda.columns import ColumnKernel, Columns
from kog_triton.backends.cuda.deep import DeepKernel
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.cuda.layout.names import STEPS
from kog_triton.backends.cuda.layout.protocol import MAX_REQUESTS, Word
from kog_triton.backends.cuda.rank_kernel import Finished, RankKernel, missing_of
from kog_triton.backends.cuda.rank_memory import Ranks
from kog_triton.backends.mailbox import Request
from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.backends.serving import InSlot, LateMask, Launch, Result, SlotWords
from kog_triton.backends.token_words import Outcome
from kog_triton.errors import RunError
from kog_triton.model.spec import ModelSpec

UNLIMITED = 1 << 62
# The kernel looks at the host's word where it has logits. A launch that has none for longer than this ends by
# itself: 128 prompt tokens of a 1B model are 30 ms, against 0.2 ms for the next launch.
MOST_SILENT = 128


@dataclass(frozen=True)
class CudaLauncher:
    """serving.Launcher.

    prompt  how the library runs a request's prompt, if it is to
    admit   lays a request into its slot, to be run from a position on
    score   runs positions [first, last) of a request's prompt: their logits, float32 [last - first, vocab]
    run     starts a kernel: slots, most steps, the kernel of several columns or that of deep positions if it is not the
            usual one of one token
    heads   starts the kernel of first tokens on slots, one behind the other or together
    gave_up what a prompt's pass has waited for in vain that was not told yet, or ""
    aside   inside, what is read waits for nothing that others have queued
    whole   a request alone is one launch: no cancel is heard before its first token
    """

    spec: ModelSpec
    ranks: Ranks
    columns: Columns
    first_tokens: Columns
    chunks: Chunks
    deep: DeepKernel
    prompt: Callable[[Request], PromptRun | None]
    admit: Callable[[Request, int], None]
    score: Callable[[Request, int, int], np.ndarray]
    run: Callable[[Sequence[int], int, ColumnKernel | None, RankKernel | None], tuple[Layout, Finished]]
    heads: Callable[[Sequence[int], ColumnKernel | None], tuple[Layout, Finished]]
    gave_up: Callable[[], str]
    aside: Callable[[], AbstractContextManager[object]]
    whole: bool = False
    stamps = True

    @property
    def device(self) -> torch.device:
        return self._devices[0]

    @property
    def _devices(self) -> list[torch.device]:
        return [memory.words.device for memory in self.ranks.each]

    def words(self, slot: int) -> SlotWords:
        m = self.ranks.first
        outbox = m.outbox[slot].numpy()
        records = m.logprobs[slot].numpy().view(np.uint64)
        return SlotWords(outbox[:, 0], outbox[:, 1], records, m.masks[slot].numpy().view(np.uint64))

    def launch(self, running: Mapping[int, InSlot], most: int | None = None) -> Launch:
        if at_head := [slot for slot, one in running.items() if one.at_head][:MAX_REQUESTS]:
            ready = self.first_tokens.ready(len(at_head))
            step = self.first_tokens.take(len(at_head), self._devices) if ready else None
            at_head = at_head[: self.first_tokens.most] if step else at_head
            layout, finished = self.heads(at_head, step)
            settle = partial(self._settle, at_head, layout, finished)
            return Launch(at_head, finished.query, settle, first_tokens=True, aside=True)
        for slot, one in running.items():
            ahead = len(one.request.prompt) - one.position
            if step := self.chunks.for_prompt(ahead, self._devices):
                return self._start([slot], MOST_CHUNKS, step, None)
        count = len(running)
        ready = self.columns.ready(count)
        step = self.columns.take(count, self._devices) if ready else None
        slots = list(running)[: self.columns.most if step else MAX_REQUESTS]
        alone = self.whole and count == 1
        steps = UNLIMITED if alone else _most_steps(running, slots)
        if most is not None:
            steps = min(steps, most * (1 if step else len(slots)))
        deepest = max(running[slot].position for slot in slots)
        deep = self.deep.take() if not step and self.deep.ready(deepest) else None

        def outdated() -> bool:
            if step:
                return False
            now = deepest + self.steps() // len(slots)
            return self.columns.ready(count) or (not deep and self.deep.ready(now))

        return self._start(slots, steps, step, deep, outdated)

    def _start(
        self,
        slots: list[int],
        most_steps: int,
        step: ColumnKernel | None,
        deep: RankKernel | None,
        outdated: Callable[[], bool] = lambda: False,
    ) -> Launch:
        layout, finished = self.run(slots, most_steps, step, deep)
        settle = partial(self._settle, slots, layout, finished)
        return Launch(slots, finished.query, settle, outdated, aside=True)

    def leave(self) -> None:
        self.ranks.first.mailbox[Word.CONTROL] = Outcome.YIELD

    def steps(self) -> int:
        return int(self.ranks.first.mailbox[Word.STEPS])

    def _settle(self, slots: Sequence[int], layout: Layout, finished: Finished) -> Result:
        with self.aside():  # a slice of a prompt may be queued behind the launch
            positions = self.ranks.first.states.cpu()[:, 0].tolist()
            try:
                outcome, last = check_launch(self.ranks, layout, finished)
            except RunError as error:
                return Result(positions, (), error=error)
        ended = () if outcome is Outcome.YIELD else (last,)
        round_robin = layout.columns == 1
        return Result(positions, ended, slots[: slots.index(last) + 1] if round_robin else slots)

    def void(self) -> str:
        with self.aside():
            return self.gave_up()

    def take_back(self, one: InSlot) -> None:
        self.ranks.take_back(one.request.slot, one.request.prompt, one.output)


def _most_steps(running: Mapping[int, InSlot], slots: Sequence[int]) -> int:
    """Steps after which the launch ends, so that a cancel in a long prompt is heard."""
    ahead = (len(running[s].request.prompt) - running[s].position for s in slots)
    silent = min(ahead) * len(slots)
    waiting = len(running) > len(slots)  # for the next launch
    return MOST_SILENT if waiting or silent > MOST_SILENT else UNLIMITED


def check_launch(ranks: Ranks, layout: Layout, finished: Finished) -> tuple[Outcome, int]:
    """Outcome and last slot of a launch that has ended; RunError if it did not end well, on any rank."""
    check_waits(ranks, layout, finished)
    words = ranks.first.mailbox.numpy()
    outcome = Outcome(int(words[Word.OUTCOME]))
    for rank, memory in enumerate(ranks.each):
        found = Outcome(int(memory.mailbox[Word.OUTCOME]))
        if found in (Outcome.RUNNING, Outcome.FAILED) or found is not outcome:
            where = f" on rank {rank}" if len(ranks.each) > 1 else ""
            raise RunError(f"the kernel ended without an outcome{where}{_absent(ranks, finished)}")
    return outcome, int(words[Word.SLOT])


@dataclass(frozen=True)
class Expired:
    """What a rank noted of a wait that expired (Memory.error)."""

    flag: int
    block: int
    step: int
    layer: int
    word: int
    seen: int
    wanted: int
    reported: int  # what was waited for; 0: it came while it was given up
    peer: int  # another rank's wait has expired


def check_waits(ranks: Ranks, layout: Layout, finished: Finished | None = None) -> None:
    """RunError that names the first wait of a launch that expired; of several ranks' one that is a cause: a wait for
    the host, or else one whose place is known."""
    notes = [(rank, Expired(*memory.error.tolist())) for rank, memory in enumerate(ranks.each)]
    expired = [(rank, note) for rank, note in notes if note.flag]
    if not expired:
        return
    rank, note = max(expired, key=lambda one: (_waits_for_mask(one[1]), one[1].reported))
    what = (
        f"layer {note.layer}, {layout.place_of(STEPS[note.step], note.word)}, seen {note.seen}, wanted {note.wanted}"
        if note.reported
        else "for a word that came while it gave up"
    )
    kind = LateMask if _waits_for_mask(note) else RunError
    raise kind(
        f"a wait of the kernel expired: rank {rank}, block {note.block}, {what}, "
        f"after {ranks.each[rank].mailbox[Word.STEPS]} steps{_absent(ranks, finished)}"
    )


def _waits_for_mask(note: Expired) -> bool:
    return note.reported != 0 and STEPS[note.step] == "mask"


def _absent(ranks: Ranks, finished: Finished | None) -> str:
    """Of ranks that others may have waited for: whose kernel was not launched, told nothing, or left before."""
    missing, told = missing_of(finished), ""
    if len(ranks.each) == 1:
        return told
    for rank, memory in enumerate(ranks.each):
        outcome, steps = (int(memory.mailbox[word]) for word in (Word.OUTCOME, Word.STEPS))
        if rank in missing:
            told += f"; the kernel of rank {rank} was not launched: {missing[rank]}"
        elif outcome == Outcome.RUNNING:
            told += f"; the kernel of rank {rank} told nothing after {steps} steps"
        elif outcome != Outcome.FAILED:
            told += f"; rank {rank} left after {steps} steps"
    return told
