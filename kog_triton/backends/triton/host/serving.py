"""The host's side of serving: requests into slots, launches, and what the kernel writes while it runs.

    generate    admit what was posted > one launch for all slots > until nothing runs, or the host yields
    poll        while a launch runs: tokens and log-probabilities out, masks and the host's words in

A launch ends when all its requests have, or at a token boundary after a yield: the caller's, or one of our own when a
request has arrived that the launch does not know. Device memory holds all that the next launch needs.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kog_triton.backends.heart import Heart, Stalled, reached
from kog_triton.backends.logprob_words import RECORD_WORDS, Logprobs, read_record
from kog_triton.backends.mailbox import Failure, Mailbox, PromptLogprob, Request, Step
from kog_triton.backends.request_words import Flag, mask_words, slow_mask
from kog_triton.backends.triton.host.pointers import Pointers
from kog_triton.backends.triton.host.seats import seat, start
from kog_triton.backends.triton.kernel.chunk import CHUNKS_FROM
from kog_triton.backends.triton.kernel.slots import (
    CANCEL,
    CANCELLED,
    EXPIRED,
    NONE_ALLOWED,
    OUTCOME,
    POSITION,
    VOID,
    YIELD,
    mailbox_offsets,
)
from kog_triton.backends.triton.kernel.sync import stamps_tokens
from kog_triton.errors import KogError, RunError
from kog_triton.sampling.definition import nothing_allowed, raw_logprobs
from kog_triton.schedule.triton import Tiles

RULES = Flag.EDITED | Flag.CUT | Flag.LOGPROBS  # what only the kernel that knows them does
SCORED = 64  # prompt positions whose logits one launch keeps
# What the function behind a request's masks may take for a token behind the first: every request of the launch waits
# for it meanwhile, the kernel a little longer than this (memory.py's PATIENCE).
MASK_S = 4.0
POLL_S = 50e-6  # how often the host looks for tokens


class Launcher(Protocol):
    """The backend, as this file needs it."""

    def start(self, slots: Sequence[int], rules: bool, chunks: bool) -> Callable[[], bool]:
        """Launch the kernel for these slots, some of which need RULES, or have so much of a prompt left
        that it pays to run it in chunks; the result tells whether it has left."""
        ...

    def expired(self) -> str:
        """What the last launch waited for in vain; "" if nothing."""
        ...

    def waited_for_mask(self) -> bool:
        """Whether that was the host's mask of a token."""
        ...

    def prefill(self, request: Request) -> int:
        """Fill the slot's cache by other means where that pays; the position to compute from."""
        ...

    def score(self, slot: int, tokens: Sequence[int], first: int, last: int) -> np.ndarray:
        """Run positions [first, last) of a slot: their logits, float32 [last - first, vocab]."""
        ...


@dataclass
class Running:
    """A request in its slot, as far as the host has read what became of it."""

    request: Request
    rules: bool  # it asks for more than a temperature
    position: int  # of the token that the next launch runs first
    output: list[int] = field(default_factory=list)
    masks: int = 0  # masks that were sent
    scored: int = 0  # positions of the prompt whose log-probabilities were told
    error: Exception | None = (
        None  # of the caller's mask; ends the request once the kernel has let go of it
    )

    @property
    def in_chunks(self) -> bool:
        """Whether enough of the prompt is left for a pass of many tokens; the last token is not for it."""
        return len(self.request.prompt) - 1 - self.position >= CHUNKS_FROM.value


class Serving:
    """Serves one mailbox at a time; `mailbox.resumed` holds what runs, slot by slot."""

    def __init__(self, pointers: Pointers, tiles: Tiles, launcher: Launcher) -> None:
        self._pointers, self._tiles, self._launcher = pointers, tiles, launcher
        self._at, self._stamped = mailbox_offsets(tiles), stamps_tokens(tiles)
        self._mail: np.ndarray = pointers.mailbox.numpy()
        self._mailbox: Mailbox | None = None
        self._arrived: list[Request] = []

    def generate(self, mailbox: Mailbox) -> None:
        """Until the mailbox is idle, closed or yields; a yield leaves every request resumable."""
        self._mailbox = mailbox
        try:
            while not (mailbox.closed or mailbox.yielding):
                self._admit(mailbox)
                if not mailbox.resumed:
                    return
                if not self._score_prompts(mailbox):
                    self._launch(mailbox)
        except BaseException:
            self._arrived = []  # of a mailbox that nobody serves again
            raise
        finally:
            self._mailbox = None

    def poll(self) -> None:
        """Bring over what the kernel wrote, and write what it waits for; nothing while nobody is served."""
        mailbox = self._mailbox
        if mailbox is None:
            return
        self._arrived += mailbox.take()
        leave = mailbox.yielding or mailbox.closed or bool(self._arrived)
        for slot, running in list(mailbox.resumed.items()):
            self._read(slot, running, mailbox)
            self._send_mask(slot, running)
            ends = mailbox.cancelled(slot) or running.error is not None
            self._mail[slot, self._at["host"]] = CANCEL.value * ends | YIELD.value * leave

    # ---- before a launch ----

    def _admit(self, mailbox: Mailbox) -> None:
        arrived, self._arrived = [*self._arrived, *mailbox.take()], []
        for request in arrived:
            try:
                flags = seat(self._pointers, self._tiles, request)
                position = request.cached
                if request.prompt_logprobs is None:
                    position = self._launcher.prefill(request)
                    start(self._pointers.states[request.slot], position, request.prompt[position])
                mailbox.resumed[request.slot] = Running(request, bool(flags & RULES), position)
            except Exception as error:  # torch's, too: a library may run out of memory
                mailbox.push(request.slot, Failure(error))

    def _score_prompts(self, mailbox: Mailbox) -> bool:
        """Log-probabilities of one chunk of a prompt that asks for them; False if there is none left."""
        for slot, running in mailbox.resumed.items():
            request = running.request
            first, end = running.scored, len(request.prompt) - 1
            if request.prompt_logprobs is None or first >= end:
                continue
            last = min(first + SCORED, end)
            try:
                if mailbox.cancelled(slot):
                    self._end(slot, Step(-1, "cancel"), mailbox)
                    return True
                rows = self._launcher.score(slot, request.prompt, first, last)
                mailbox.push_prompt(slot, _prompt_logprobs(request, rows, first))
            except Exception as error:
                self._end(slot, Failure(error), mailbox)
                return True
            running.scored = mailbox.prefilled[slot] = last
            if last == end:
                start(self._pointers.states[slot], last, request.prompt[last])
                running.position = last
            return True
        return False

    # ---- a launch ----

    def _launch(self, mailbox: Mailbox) -> None:
        """One launch for all slots, until the kernel has left."""
        slots = list(mailbox.resumed)
        beat = self._mail[0, self._at["beat"] :]
        beat[0] = 0
        self.poll()  # masks, and whether a request was cancelled meanwhile
        running = mailbox.resumed.values()
        before = reached(self._pointers.words.device)
        done = self._launcher.start(
            slots, any(r.rules for r in running), any(r.in_chunks for r in running)
        )
        heart = Heart(before, done)  # from here on: a kernel may have been compiled first
        try:
            while not done():
                heart.listen(int(beat[0]))
                self.poll()
                time.sleep(POLL_S)
        except BaseException as error:  # nobody may leave while the kernel writes to this memory
            self._mail[:, self._at["host"]] = YIELD.value
            while not isinstance(error, Stalled) and not done():
                heart.listen(int(beat[0]))
                time.sleep(POLL_S)
            raise
        self.poll()
        self._settle(slots, mailbox)

    def _settle(self, slots: list[int], mailbox: Mailbox) -> None:
        """After a launch: requests that failed leave; the others stand at a token, from which the next one goes on."""
        states = self._pointers.states.cpu()[:, 0].tolist()
        expired = self._launcher.expired()
        if expired and self._launcher.waited_for_mask() and self._went_on(slots, states, mailbox):
            # The block that waited told all of them to leave, in a pass of one slot's token.
            expired = ""
            for slot, running in mailbox.resumed.items():
                if states[slot][OUTCOME.value] == EXPIRED.value:
                    states[slot] = self._undo(slot, running)
        for slot, running in list(mailbox.resumed.items()):
            running.position = mailbox.prefilled[slot] = states[slot][POSITION.value]
            if expired:
                self._end(slot, Failure(RunError(f"{expired}: the run is void")), mailbox)
            elif running.error is not None:
                self._end(slot, Failure(running.error), mailbox)
            elif states[slot][OUTCOME.value]:
                untold = RunError("the triton kernel ended a request and did not say why")
                self._end(slot, Failure(untold), mailbox)

    def _went_on(self, slots: list[int], states: list[list[int]], mailbox: Mailbox) -> bool:
        """Whether a launch ended a request or a pass; if not, its masks were there when it began."""
        running = mailbox.resumed
        return len(running) < len(slots) or any(
            one.error is not None
            or states[slot][POSITION.value] > one.position + (states[slot][OUTCOME.value] != 0)
            for slot, one in running.items()
        )

    def _undo(self, slot: int, running: Running) -> list[int]:
        """Take back a pass that chose no token: the state before it."""
        request, output = running.request, running.output
        known = [*request.prompt, *output]
        state = start(self._pointers.states[slot], len(known) - 1, known[-1], len(output))
        self._mail[slot, self._at["result"]] = 0
        return state

    def _read(self, slot: int, running: Running, mailbox: Mailbox) -> None:
        """Push the tokens that have come, and the end of a request that ended without one."""
        request, mail = running.request, self._mail[slot]
        while True:
            number = len(running.output) + 1
            word = int(mail[self._at["tokens"] + number - 1]) if number <= request.max_tokens else 0
            if word >> 32 != number:
                break
            stamp = int(mail[self._at["stamps"] + number - 1])
            if self._stamped and not stamp:
                return  # on its way: the GPU's stores reach the host in any order
            logprob: float | None = None
            top: tuple[tuple[int, float], ...] = ()
            if request.params.logprobs is not None:
                told = self._record(slot, number, request.params.logprobs)
                if told is None:
                    return  # some of it is still on its way
                logprob, top = told
            token = word & 0xFFFFFFFF
            finish = None
            if token in request.stop_token_ids:
                finish = "stop"
            elif number == request.max_tokens:
                finish = "length"
            running.output.append(token)
            mailbox.prefilled[slot] = len(request.prompt) + number - 1
            step = Step(token, finish, logprob, top, stamp)
            if running.error is not None:
                continue  # chosen without the mask that was to come
            if finish is not None:
                self._end(slot, step, mailbox)
                return
            mailbox.push(slot, step)
        self._read_result(slot, running, mailbox)

    def _record(self, slot: int, number: int, k: int) -> Logprobs | None:
        first = self._at["records"] + (number - 1) * RECORD_WORDS
        record = self._mail[slot, first : first + RECORD_WORDS].view(np.uint64)
        return read_record(record, number, min(k, self._tiles.vocab_size))

    def _read_result(self, slot: int, running: Running, mailbox: Mailbox) -> None:
        """End a request that was cancelled or has no token to choose; a token's own end is `_read`'s."""
        result = int(self._mail[slot, self._at["result"]])
        outcome, made, position = result & 0xFF, result >> 8 & 0xFFFFFF, result >> 32
        told = len(running.output)
        if running.error is not None and outcome:
            self._end(slot, Failure(running.error), mailbox)
        elif outcome == CANCELLED.value and told == made:
            mailbox.prefilled[slot] = position
            self._end(slot, Step(-1, "cancel"), mailbox)
        elif outcome in (VOID.value, NONE_ALLOWED.value) and told == made - 1:
            self._end(slot, Failure(self._void(outcome, position)), mailbox)

    def _void(self, outcome: int, position: int) -> KogError:
        if outcome == NONE_ALLOWED.value:
            return nothing_allowed(position)
        advice = "; float16 holds up to 65504: try --dtype bf16" if self._tiles.f16 else ""
        return RunError(
            f"the logits of position {position} hold NaN or +inf: the run is void{advice}"
        )

    def _end(self, slot: int, last: Step | Failure, mailbox: Mailbox) -> None:
        del mailbox.resumed[slot]
        mailbox.push(slot, last)

    def _send_mask(self, slot: int, running: Running) -> None:
        """The caller's mask of the next token, once for each; if the caller fails, one that lets the kernel go on."""
        number = len(running.output) + 1
        mask = running.request.mask
        if mask is None or running.masks == number or number > running.request.max_tokens:
            return
        begun = time.monotonic()
        try:
            words = mask_words(mask(running.output), self._tiles.vocab_size, number)
            if number > 1 and time.monotonic() - begun > MASK_S:
                raise slow_mask(MASK_S)
        except Exception as error:
            running.error = error
            words = mask_words(None, self._tiles.vocab_size, number)
        running.masks = number
        self._mail[slot, self._at["mask"] : self._at["records"]] = words.view(np.int64)


def _prompt_logprobs(request: Request, rows: np.ndarray, first: int) -> list[PromptLogprob]:
    """Tokens first + 1 .. of the prompt, each by the logits of the position before."""
    out = []
    for position, (row, token) in enumerate(
        zip(rows, request.prompt[first + 1 :], strict=False), first + 1
    ):
        logprob, top = raw_logprobs(row, token, request.prompt_logprobs or 0)
        if math.isnan(logprob):
            raise RunError(f"the logits of position {position} hold NaN or +inf: the run is void")
        out.append(PromptLogprob(token, logprob, top))
    return out
