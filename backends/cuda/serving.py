"""Requests on the kernel: gathered into launches, read while they speak, taken up where they stood.

    seat ---> launch ---> tokens ... ---> the launch ends ---> finished, failed, cancelled: gone
      ^                                                        the others: next launch
      a request that arrives, is cancelled or yields ends the launch at a token boundary

A launch serves one request; several in token columns, a token of each a step; or, where a model has no such
kernel or it is still being compiled, several in turn, a token each. It ends when one of them does. A prompt
goes first, alone and in chunks (chunks.py), while the others wait; before it one whose tokens' log-probabilities
are asked for, in pieces. All that a request needs is in the memory of its slot, so that the next launch, of
whichever kind, goes on bit for bit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from kog_triton.backends.cuda.chunks import MOST_CHUNKS, Chunks
from kog_triton.backends.cuda.columns import ColumnKernel, Columns
from kog_triton.backends.cuda.layout.layout import MOST_SEATS, Layout
from kog_triton.backends.cuda.layout.names import STEPS
from kog_triton.backends.cuda.layout.protocol import Outcome, Word
from kog_triton.backends.cuda.memory import Memory

from kog_triton.backends.heart import Heart, Stalled, reached
from kog_triton.backends.logprob_words import read_record
from kog_triton.backends.mailbox import Failure, Mailbox, Request, Step
from kog_triton.backends.request_words import EVERY_EPOCH, mask_words, slow_mask
from kog_triton.backends.serve import prompt_logprobs
from kog_triton.errors import RunError
from kog_triton.sampling.definition import nothing_allowed

LOW_HALF = 0xFFFFFFFF  # of a word of the outbox: the token; above it, its number
LEAST_NO_TOKEN = 0xFFFFFFFE  # what the kernel says in the place of a token it could not choose
UNLIMITED = 1 << 62
# The kernel looks at the host's word where it has logits. A launch that has none for longer than this ends by
# itself: 128 prompt tokens of a 1B model are 30 ms, against 0.2 ms for the next launch.
MOST_SILENT = 128
# Positions of a prompt that one launch scores, in which the host is not heard: 40 to 220 ms of models of 1B to 8B,
# at 0.6 to 3.5 ms a token (README.md). Their logits are 38 MB of 150,000 float32.
SCORED = 64
# What the function behind a request's masks may take for a token behind the first: every request of the step waits
# for it meanwhile, the kernel no longer than backend.py's WAIT_TICKS.
MASK_S = 2.0
POLL_S = 50e-6  # how often the host looks for tokens


class LateMask(RunError):
    """A launch waited for a mask in vain. What it had not ended by then can run again."""


class Finished(Protocol):
    """The end of a launch, as torch.cuda.Event says it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass
class Live:
    """A request in a slot. `position` is that of its next step when the launch began.

    While its prompt is not `scored` it has no seat, and `position` is that of its next piece.
    """

    request: Request
    scored: bool
    position: int = 0
    made: int = 0
    finish: str | None = None
    output: list[int] = field(default_factory=list)
    error: Exception | None = None  # with which it ends


@dataclass(frozen=True)
class Launch:
    """A launch in flight, of a kernel of this layout."""

    slots: list[int]
    layout: Layout
    finished: Finished

    @property
    def together(self) -> bool:
        return self.layout.columns > 1 and not self.layout.chunk


@dataclass(frozen=True)
class Launcher:
    """What serving needs of a backend."""

    memory: Memory
    columns: Columns
    chunks: Chunks
    # Lays a request into its slot, one that asks for it behind its scored prompt; the position to start from.
    seat: Callable[[Request], int]
    # Runs positions [first, last) of a request's prompt: their logits, float32 [last - first, vocab].
    score: Callable[[Request, int, int], np.ndarray]
    # slots, most steps, the kernel of several columns if it is not that of one token
    launch: Callable[[list[int], int, ColumnKernel | None], Launch]
    # A request alone is one launch: no cancel is heard before its first token.
    whole: bool = False


def serve(launcher: Launcher, mailbox: Mailbox) -> None:
    """Serve until the mailbox is idle, closed or yields; what is in flight then waits in `resumed`."""
    live: dict[int, Live] = mailbox.resumed
    arrivals: list[Request] = []
    while True:
        if not _stops(mailbox):
            arrivals += mailbox.take()
        for request in arrivals:
            one = Live(request, scored=request.prompt_logprobs is None)
            try:
                if one.scored:
                    _seat(launcher, one)
                live[request.slot] = one
            except Exception as error:
                mailbox.push(request.slot, Failure(error))
        for slot in [slot for slot in live if mailbox.cancelled(slot)]:
            mailbox.push(slot, Step(-1, "cancel"))
            del live[slot]
        if _stops(mailbox) or not live:
            return
        arrivals = _advance(launcher, mailbox, live)


def _advance(launcher: Launcher, mailbox: Mailbox, live: dict[int, Live]) -> list[Request]:
    """A piece of a prompt that is to be scored, or else a launch; requests that were posted meanwhile."""
    for slot, one in live.items():
        if one.scored:
            continue
        try:
            _score_piece(launcher, mailbox, one)
        except Exception as error:
            del live[slot]
            mailbox.push(slot, Failure(error))
        return []
    return _run(launcher, mailbox, live)


def _score_piece(launcher: Launcher, mailbox: Mailbox, one: Live) -> None:
    """Log-probabilities of the next piece of a prompt; behind the last one the request takes its seat."""
    request, first = one.request, one.position
    end = len(request.prompt) - 1  # the logits of the last token are those of the answer
    last = min(first + SCORED, end)
    if first < last:
        rows = launcher.score(request, first, last)
        mailbox.push_prompt(request.slot, prompt_logprobs(request, rows, first + 1))
        one.position = mailbox.prefilled[request.slot] = last
    if last == end:
        _seat(launcher, one)
        one.scored = True


def _seat(launcher: Launcher, one: Live) -> None:
    one.position = launcher.seat(one.request)
    if one.request.mask is not None:
        _bring_mask(launcher.memory, one)


def _stops(mailbox: Mailbox) -> bool:
    return mailbox.closed or mailbox.yielding


def _run(launcher: Launcher, mailbox: Mailbox, live: dict[int, Live]) -> list[Request]:
    """One launch; requests that were posted meanwhile. Those that ended are gone from `live`."""
    words = launcher.memory.mailbox.numpy()
    arrivals: list[Request] = []
    before = reached(launcher.memory.words.device)
    launch = _begin(launcher, live)
    heart = Heart(before, launch.finished.query)
    slots, in_turn = launch.slots, launch.layout.columns == 1
    try:
        while True:
            done = launch.finished.query()  # before the words: what it leaves behind is complete
            if not done:  # nor is a caller's function, which may be called next, the GPU's silence
                heart.listen(int(words[Word.STEPS]))
            for slot in slots:
                _read(launcher.memory, mailbox, live[slot])
            if done:
                break
            arrivals += mailbox.take()
            if (
                arrivals
                or _stops(mailbox)
                or (in_turn and launcher.columns.ready(len(live)))
                or any(mailbox.cancelled(slot) or live[slot].error for slot in slots)
            ):
                words[Word.CONTROL] = Outcome.YIELD
            time.sleep(POLL_S)
    except BaseException as error:
        # The kernel must not write into slots that others have got meanwhile.
        words[Word.CONTROL] = Outcome.YIELD
        while not isinstance(error, Stalled) and not launch.finished.query():
            heart.listen(int(words[Word.STEPS]))
            time.sleep(POLL_S)
        raise
    _settle(launcher.memory, mailbox, live, launch)
    return arrivals


def _begin(launcher: Launcher, live: dict[int, Live]) -> Launch:
    device, columns = launcher.memory.words.device, launcher.columns
    for slot, one in live.items():
        if step := launcher.chunks.for_prompt(len(one.request.prompt) - one.position, device):
            return launcher.launch([slot], MOST_CHUNKS, step)
    step = columns.take(len(live), device) if columns.ready(len(live)) else None
    slots = list(live)[: columns.most if step else MOST_SEATS]
    alone = launcher.whole and len(live) == 1
    return launcher.launch(slots, UNLIMITED if alone else _most_steps(live, slots), step)


def _most_steps(live: dict[int, Live], slots: list[int]) -> int:
    """Steps after which the launch ends, so that a cancel in a long prompt is heard."""
    silent = min(len(live[s].request.prompt) - live[s].position for s in slots) * len(slots)
    waiting = len(live) > len(slots)  # for a seat
    return MOST_SILENT if waiting or silent > MOST_SILENT else UNLIMITED


def _read(memory: Memory, mailbox: Mailbox, one: Live) -> None:
    """Hand on the tokens that came since."""
    request = one.request
    box = memory.outbox[request.slot].numpy()
    k = request.params.logprobs
    while one.finish is None and one.error is None:
        word, device_ns = (int(w) for w in box[one.made])
        token = word & LOW_HALF
        if word >> 32 != one.made + 1 or token >= LEAST_NO_TOKEN:
            return
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        if k is not None:
            records = memory.logprobs[request.slot].numpy().view(np.uint64)
            best = min(k, memory.counts.shape[1])
            read = read_record(records[one.made], one.made + 1, best)
            if read is None:
                return
            logprob, top = read
        one.made += 1
        if token in request.stop_token_ids:
            one.finish = "stop"
        elif one.made == request.max_tokens:
            one.finish = "length"
        mailbox.prefilled[request.slot] = len(request.prompt) + one.made - 1
        mailbox.push(request.slot, Step(token, one.finish, logprob, top, device_ns))
        one.output.append(token)
        if request.mask is not None and one.finish is None:
            begun = time.monotonic()
            try:
                _bring_mask(memory, one)
                if time.monotonic() - begun > MASK_S:
                    raise slow_mask(MASK_S)
            except Exception as error:
                one.error = error
                _put_mask(memory, one, None, EVERY_EPOCH)  # until the launch has ended


def _bring_mask(memory: Memory, one: Live) -> None:
    """The mask of the next token, which the kernel waits for."""
    assert one.request.mask is not None
    _put_mask(memory, one, one.request.mask(one.output), one.made + 1)


def _put_mask(memory: Memory, one: Live, mask: np.ndarray | None, epoch: int) -> None:
    words = mask_words(mask, memory.counts.shape[1], epoch)
    memory.masks[one.request.slot].numpy().view(np.uint64)[:] = words


def _settle(memory: Memory, mailbox: Mailbox, live: dict[int, Live], launch: Launch) -> None:
    """After a launch: requests that ended leave, those that were served go to the end of the line."""
    slots = launch.slots
    positions = memory.states.cpu()[:, 0].tolist()
    outcomes: dict[int, Outcome] = {}
    served: list[int] = []
    try:
        outcome, last = check_launch(memory, launch.layout)
        outcomes, served = {last: outcome}, slots[: slots.index(last) + 1]
        if launch.together:
            words = memory.mailbox[Word.COLUMNS :].tolist()
            outcomes, served = {s: Outcome(w) for s, w in zip(slots, words, strict=False)}, slots
    except RunError as error:
        # A step that waited for a mask in vain leaves all as it was before it: with the mask it runs again. Of
        # a launch that ended no step, the masks were there when it began.
        made_one = any(positions[slot] > live[slot].position for slot in slots)
        if not (isinstance(error, LateMask) and made_one):
            for slot in slots:
                if live.pop(slot).finish is None:
                    mailbox.push(slot, Failure(error))
            return
        for slot in slots:
            memory.recount(slot, live[slot].request.prompt, live[slot].output)
    for slot in slots:
        one = live.pop(slot) if slot in served else live[slot]
        live[slot] = one
        one.position = mailbox.prefilled[slot] = positions[slot]
        if slot in outcomes and one.finish is None and one.error is None:
            one.error = _why_ended(outcomes[slot], one)
        if one.error is not None:
            mailbox.push(slot, Failure(one.error))
        if one.finish is not None or one.error is not None:
            del live[slot]


def _why_ended(outcome: Outcome, one: Live) -> Exception | None:
    """The error of a request that the kernel ended without a last token; None if it goes on."""
    if outcome in (Outcome.YIELD, Outcome.RUNNING):
        return None
    if outcome is Outcome.NOT_FINITE:
        return RunError(f"the logits hold NaN or +inf after {one.made} tokens: the run is void")
    if outcome is Outcome.NOTHING_ALLOWED:
        return nothing_allowed(len(one.request.prompt) + one.made)
    return RunError("the cuda kernel ended a request that goes on")


def check_launch(memory: Memory, layout: Layout) -> tuple[Outcome, int]:
    """Outcome and last slot of a launch that has ended; RunError if it did not end well."""
    check_waits(memory, layout)
    words = memory.mailbox.numpy()
    outcome = Outcome(int(words[Word.OUTCOME]))
    if outcome in (Outcome.RUNNING, Outcome.FAILED):
        raise RunError("the cuda kernel ended without an outcome")
    return outcome, int(words[Word.SLOT])


def check_waits(memory: Memory, layout: Layout) -> None:
    """RunError that names the first wait of a launch that expired."""
    flag, block, step, layer, word, seen, wanted, told = memory.error.tolist()
    if not flag:
        return
    what = f"layer {layer}, {layout.place_of(STEPS[step], word)}, seen {seen}, wanted {wanted}"
    if not told:
        what = "for a word that came while it gave up"
    kind = LateMask if told and STEPS[step] == "mask" else RunError
    raise kind(
        f"a wait of the cuda kernel expired: rank 0, block {block}, {what}, "
        f"after {memory.mailbox[Word.STEPS]} steps"
    )
