"""Launches of the Triton kernel for requests (backends/serving.py): one serves all slots, until none runs or it is to
leave. What slots keep is in device memory (slots.py).
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
from kog_triton.backends.triton.host.waits import describe_wait, mask_was_late
from kog_triton.backends.triton.kernel.chunk import CHUNKS_FROM
from kog_triton.backends.triton.kernel.slots import BEAT, HOST, OUTCOME, POSITION, mailbox_offsets
from kog_triton.backends.triton.kernel.sync import stamps_tokens
from kog_triton.errors import RunError
from kog_triton.model.spec import ModelSpec
from kog_triton.schedule.triton import Tiles

RULES = Flag.EDITED | Flag.CUT | Flag.LOGPROBS  # what only the kernel that knows them does


@dataclass
class TritonLauncher:
    """serving.Launcher.

    prompt   how the library runs a request's prompt, if it is to
    logits   of positions [first, last) of a prompt, run in a cache [1, ...]
    run      launches the kernel: whether with all sampling rules, and with prompts in chunks, and its columns; asks
             whether it has left
    columns  of the kernel that so many requests share a step of; 1 if they take turns
    """

    spec: ModelSpec
    memory: Memory
    tiles: Tiles
    prompt: Callable[[Request], PromptRun | None]
    logits: Callable[[torch.Tensor, Sequence[int], int, int], np.ndarray]
    run: Callable[[bool, bool, int], Callable[[], bool]]
    columns: Callable[[int], int] = lambda requests: 1
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
        """It ends when the host says so, whatever `most` is, or where requests share steps with the first of them."""
        self._mail[0, HOST] = self._mail[0, BEAT] = 0
        columns = self.columns(len(running))
        slots = list(running)[: columns if columns > 1 else None]
        order = torch.tensor([len(slots), *slots], dtype=torch.int32)
        self.memory.pointers.slot_order[: len(order)] = order.to(self.device)
        ruled = any(
            flags_of(running[slot].request, self.tiles.vocab_size) & RULES for slot in slots
        )
        # whether enough of a prompt is left for a pass of many tokens; the last token is not for it
        ahead = max(len(running[s].request.prompt) - 1 - running[s].position for s in slots)
        ended = self.run(ruled, ahead >= CHUNKS_FROM.value, columns)
        served = slots if columns > 1 else slots[:1]
        outdated = partial(self._outdated, columns, len(running))
        settle = partial(self._settle, slots, served)
        return Launch(slots, ended, settle, outdated, together=columns > 1)

    def _outdated(self, columns: int, requests: int) -> bool:
        return columns == 1 and self.columns(requests) > 1

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
        # The next launch begins with others: launches may end at every token.
        return Result(positions, ended, served, self._expired())

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
