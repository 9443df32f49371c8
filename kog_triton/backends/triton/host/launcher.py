"""Launches of the Triton kernels for requests (backends/serving.py): that of one token serves all slots, until none
runs or it is to leave; those of shared steps serve up to eight. What slots keep is in device memory (slots.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kog_triton.backends.logprob_words import RECORD_WORDS
from kog_triton.backends.mailbox import Request
from kog_triton.backends.prefill.slices import PromptRun
from kog_triton.backends.request_words import Flag, flags_of
from kog_triton.backends.serving import InSlot, LateMask, Launch, Result, SlotWords
from kog_triton.backends.token_words import Outcome
from kog_triton.backends.triton.host.admission import admit, start
from kog_triton.backends.triton.host.memory import Memory
from kog_triton.backends.triton.host.shared_steps import SharedSteps
from kog_triton.backends.triton.host.waits import describe_wait, mask_was_late
from kog_triton.backends.triton.kernel.chunk import CHUNKS_FROM
from kog_triton.backends.triton.kernel.slots import BEAT, HOST, OUTCOME, POSITION, mailbox_offsets
from kog_triton.backends.triton.kernel.sync import stamps_tokens
from kog_triton.errors import RunError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.triton import Tiles

# Steps of a launch while other requests wait for the next one.
WHILE_OTHERS_WAIT = 16
RULES = Flag.EDITED | Flag.CUT | Flag.LOGPROBS  # what only the kernel that knows them does


@dataclass
class TritonLauncher:
    """serving.Launcher.

    prompt   how the library runs a request's prompt, if it is to
    logits   of positions [first, last) of a prompt, run in a cache [1, ...]
    run      launches a kernel: whether with all sampling rules, with prompts in chunks, and its columns; asks whether
             it has left
    """

    spec: ModelSpec
    memory: Memory
    tiles: Tiles
    prompt: Callable[[Request], PromptRun | None]
    logits: Callable[[torch.Tensor, Sequence[int], int, int], np.ndarray]
    run: Callable[[bool, bool, int], Callable[[], bool]]
    shared_steps: SharedSteps
    outcomes: list[int] = field(default_factory=list)  # slot by slot, of the last launch

    def __post_init__(self) -> None:
        self.device = self.memory.pointers.words.device
        self.stamps = stamps_tokens(self.tiles)
        self._mail: np.ndarray = self.memory.pointers.mailbox.numpy()

    def admit(self, request: Request, position: int) -> None:
        admit(self.memory.pointers, self.tiles, request, position)

    def words(self, slot: int) -> SlotWords:
        mail, at = self._mail[slot], mailbox_offsets(self.tiles)
        return SlotWords(
            mail[at["tokens"] : at["stamps"]],
            mail[at["stamps"] : at["mask"]],
            mail[at["records"] : at["end"]].view(np.uint64).reshape(-1, RECORD_WORDS),
            mail[at["mask"] : at["records"]].view(np.uint64),
        )

    def score(self, request: Request, first: int, last: int) -> np.ndarray:
        kv = self.memory.pointers.kv[request.slot : request.slot + 1]
        return self.logits(kv, request.prompt, first, last)

    def launch(self, running: Mapping[int, InSlot], most: int | None = None) -> Launch:
        """It ends when the host says so, whatever `most` is, or where requests share steps with the first of them.

        They take turns while one's prompt goes in chunks, and until a kernel of columns is ready.
        """
        self._mail[0, HOST] = self._mail[0, BEAT] = 0
        first = dict(list(running.items())[: self.shared_steps.most])
        chunks, ruled = _in_chunks(first), self._ruled(first)
        columns = 1 if chunks else self.shared_steps.ready(len(first), ruled)
        if columns > 1:
            slots, served = list(first), list(first)
            outdated = partial(self._others_are_due, len(running) > len(first))
        else:
            slots, served = list(running), list(running)[:1]
            outdated = partial(self._can_share, first, ruled)
            chunks, ruled = _in_chunks(running), self._ruled(running)
        order = torch.tensor([len(slots), *slots], dtype=torch.int32)
        self.memory.pointers.slot_order[: len(order)] = order.to(self.device)
        ended = self.run(ruled, chunks, columns)
        # The next launch begins with others: launches may end at every token.
        settle = partial(self._settle, slots, served)
        return Launch(slots, ended, settle, outdated, together=columns > 1)

    def _can_share(self, first: Mapping[int, InSlot], ruled: bool) -> bool:
        """Whether these, who come first, need not go round robin any more."""
        waits = any(not one.output for one in first.values()) and _in_chunks(first)
        return not waits and self.shared_steps.ready(len(first), ruled) > 1

    def _others_are_due(self, others_wait: bool) -> bool:
        return others_wait and self.steps() >= WHILE_OTHERS_WAIT

    def _ruled(self, running: Mapping[int, InSlot]) -> bool:
        vocab = self.tiles.vocab_size
        return any(flags_of(one.request, vocab) & RULES for one in running.values())

    def leave(self) -> None:
        self._mail[0, HOST] = Outcome.YIELD

    def steps(self) -> int:
        return int(self._mail[0, BEAT])

    def _settle(self, slots: Sequence[int], served: Sequence[int]) -> Result:
        states = self.memory.pointers.states.cpu()[:, 0]
        self.outcomes = states[:, OUTCOME.value].tolist()
        # A pass that failed has counted its position already.
        failed = (states[:, OUTCOME.value] == Outcome.FAILED).int()
        positions = (states[:, POSITION.value] - failed).tolist()
        ended = [s for s in slots if self.outcomes[s] not in (0, Outcome.FAILED)]
        return Result(positions, ended, served, self._expired())

    def void(self) -> str:
        return ""

    def take_back(self, one: InSlot) -> None:
        # The block that waited told all of them to leave, in a pass of one slot's token.
        if self.outcomes[one.request.slot] == Outcome.FAILED:
            known = [*one.request.prompt, *one.output]
            states = self.memory.pointers.states[one.request.slot]
            start(states, len(known) - 1, known[-1], len(one.output))

    def _expired(self) -> RunError | None:
        errors = self.memory.pointers.error.tolist()
        expired = describe_wait(errors, self.tiles, self.steps())
        kind = LateMask if mask_was_late(errors) else RunError
        return kind(f"{expired}: the run is void") if expired else None


def _in_chunks(running: Mapping[int, InSlot]) -> bool:
    """Whether enough of a prompt is left for a pass of many tokens; the last token is not for it."""
    ahead = max(len(one.request.prompt) - 1 - one.position for one in running.values())
    return ahead >= CHUNKS_FROM.value
