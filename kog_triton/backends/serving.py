"""Requests on a GPU's kernel: gathered into launches, read while they run, taken up where they stood.

    admit ---> launch ---> tokens ... ---> the launch ends ---> finished, failed, cancelled: gone
       ^                                                        the others: next launch
       a request that arrives, is cancelled or yields ends the launch at a token boundary

`Serving` is what every backend's loop does with its requests; `LaunchServing` is the loop of backends whose kernels
make the tokens: each brings a `Launcher`. Why a request ends is the kernel's to say, in the word of its last token
(token_words.py). A prompt whose tokens' log-probabilities are asked for goes first, in pieces, while the others
wait; one that a library runs goes slice by slice between the others' launches (`Share`), each slice queued behind a
launch that has not ended yet, so that the GPU waits for no host between them. All that a request needs is in the memory
of its slot, so that the next launch goes on bit for bit.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from kog_triton.backends.device import Clock
from kog_triton.backends.launch_queue import LaunchQueue, LaunchQueues
from kog_triton.backends.logprob_words import read_record
from kog_triton.backends.mailbox import Failure, Mailbox, PromptLogprob, Request, Step
from kog_triton.backends.pace import COARSE_S, Pace, exact_sleeps
from kog_triton.backends.prefill.share import Share
from kog_triton.backends.prefill.slices import ALONE_S, PromptRun
from kog_triton.backends.request_words import mask_words, slow_mask
from kog_triton.backends.token_words import Outcome, read_word
from kog_triton.backends.watchdog import Heart, Stalled, reached
from kog_triton.errors import KogError, RunError
from kog_triton.model.spec import DType, ModelSpec
from kog_triton.sampling import rank_of, raw_logprobs
from kog_triton.sampling.definition import nothing_allowed

FINISH = {Outcome.STOP: "stop", Outcome.LENGTH: "length"}
# Positions of a prompt that one launch scores, in which the host is not heard: 40 to 220 ms of models of 1B to 8B on
# the CUDA backend, at 0.6 to 3.5 ms a token (benchmarks/RESULTS.md). Their logits are 38 MB of 150,000 float32.
SCORED = 64
# What the function behind a request's masks may take for a token after the first: every request of the launch waits
# for it meanwhile, the kernel as long as the backend has it wait, or longer.
MASK_S = 2.0


@dataclass
class Running:
    """A request in its slot. `position` is that of the token that runs next, as far as the host has heard."""

    request: Request
    position: int


R = TypeVar("R", bound=Running)


class Serving(ABC, Generic[R]):
    """Serves one mailbox; `mailbox.resumed` holds what runs, slot by slot."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.running: dict[int, R] = mailbox.resumed

    @abstractmethod
    def begin(self, request: Request) -> R:
        """Lay a request into its slot."""

    @abstractmethod
    def advance(self) -> None:
        """Go on with those that run."""

    def run(self) -> None:
        """Until the mailbox is idle, closed or yields; a yield leaves every request resumable."""
        mailbox = self.mailbox
        while not mailbox.stops:
            for request in mailbox.take():
                self.attempt(request.slot, partial(self._admit, request))
            for slot, one in list(self.running.items()):
                if mailbox.cancelled(slot):
                    self.tell(one, Step(-1, "cancel"))
            if not self.running:
                return
            self.advance()
            mailbox.beat()

    def attempt(self, slot: int, action: Callable[[], None]) -> None:
        """What goes wrong is the error of this slot's request alone, but for a GPU that falls silent."""
        try:
            action()
        except Stalled:
            raise
        except Exception as error:  # torch's, too: a library may run out of memory
            self.fail(slot, error)

    def tell(self, one: R, step: Step) -> None:
        """A step to the caller; a request whose step is its last is gone."""
        slot = one.request.slot
        if step.finish is not None:
            del self.running[slot]
            step = step._replace(held=one.position)
        self.mailbox.push(slot, step)

    def fail(self, slot: int, error: Exception) -> None:
        self.running.pop(slot, None)
        self.mailbox.push(slot, Failure(error))

    def _admit(self, request: Request) -> None:
        self.running[request.slot] = self.begin(request)


def prompt_logprobs(r: Request, rows: np.ndarray, first: int) -> list[PromptLogprob]:
    """The prompt's tokens from position `first` on, each by the logits of the position before.

    rows float32 [positions, vocab], from `first - 1` on. RunError if one holds NaN or +inf.
    """
    out = []
    for position, (row, token) in enumerate(zip(rows, r.prompt[first:], strict=False), first):
        logprob, top = raw_logprobs(row, token, r.prompt_logprobs or 0)
        if math.isnan(logprob):
            raise RunError(f"the logits of position {position} hold NaN or +inf: the run is void")
        out.append(PromptLogprob(token, logprob, top, rank_of(row, token)))
    return out


# ---- launches ----


class LateMask(RunError):
    """A launch waited for a mask in vain. What it had not ended by then can run again."""


class SlotWords(NamedTuple):
    """What a slot's kernel and the host write for each other, in memory that both see; one a token, but for `mask`."""

    tokens: np.ndarray  # int64: see token_words
    stamps: np.ndarray  # int64: the GPU's clock in ns
    records: np.ndarray  # uint64 [tokens, RECORD_WORDS]: see logprob_words
    mask: np.ndarray  # uint64 [ceil(vocab / 32)]: see request_words.mask_words


@dataclass
class InSlot(Running):
    """A request of a kernel. `words` is None until its prompt was scored or run by a library, if it is to be.

    prompt   the library's run of its prompt, until that has ended
    ran_all  that has run the last token of the prompt, too, through all layers
    """

    words: SlotWords | None = None
    prompt: PromptRun | None = None
    ran_all: bool = False
    output: list[int] = field(default_factory=list)
    error: Exception | None = None  # of the caller's mask; ends the request once the launch has

    @property
    def at_head(self) -> bool:
        """Its first token needs the head alone."""
        return self.ran_all and self.position < len(self.request.prompt)


@dataclass(frozen=True)
class Result:
    """What a launch left.

    positions  of every slot's next token
    ended      slots whose requests the kernel ended
    served     slots that go to the end of the line
    error      what it waited for in vain
    """

    positions: Sequence[int]
    ended: Collection[int]
    served: Sequence[int] = ()
    error: RunError | None = None


@dataclass(frozen=True)
class Launch:
    """A launch in flight.

    settle    what it left, once it has ended
    outdated  whether a kernel that serves those who run faster is ready by now
    together  whether it ends with the first of its requests that ends, and not with the last
    first_tokens  it makes those alone, of prompts that the library has run
    aside     `settle` waits for nothing that was queued behind it
    """

    slots: Sequence[int]
    ended: Callable[[], bool]
    settle: Callable[[], Result]
    outdated: Callable[[], bool] = lambda: False
    together: bool = True
    first_tokens: bool = False
    aside: bool = False


class Launcher(Protocol):
    """What serving needs of a backend."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def stamps(self) -> bool:
        """Whether every token brings its time."""

    def prompt(self, request: Request) -> PromptRun | None:
        """How a request's prompt runs by other means than the kernel, where that pays: all of it, and the kernel's next
        launch of the request begins at the head; or all but its last token."""

    def admit(self, request: Request, position: int) -> None:
        """Lay a request into its slot, to be run from a position on."""

    def words(self, slot: int) -> SlotWords: ...

    def score(self, request: Request, first: int, last: int) -> np.ndarray:
        """Run positions [first, last) of a request's prompt: their logits, float32 [last - first, vocab]."""

    def launch(self, running: Mapping[int, InSlot], most: int | None = None) -> Launch:
        """Start a kernel for some of those that run, in their order; one that ends after `most` tokens of each if it
        can."""

    def leave(self) -> None:
        """Have the launch end at the next token boundary."""

    def steps(self) -> int:
        """The heartbeat of the launch: another number after every step."""

    def void(self) -> str:
        """What GPUs have waited for in vain in a prompt's pass, if that is why its logits are no numbers; else ""."""

    def take_back(self, one: InSlot) -> None:
        """Undo what a step that waited for a mask in vain has done to its request."""


class LaunchServing(Serving[InSlot]):
    def __init__(self, launcher: Launcher, mailbox: Mailbox, queue: LaunchQueue | LaunchQueues) -> None:
        super().__init__(mailbox)
        self._launcher, self._queue = launcher, queue
        self._heart: Heart | None = None  # of the launch in flight
        self._leaving = False  # it was told to
        self._share = Share()
        self._last: PromptRun | None = None  # whose slice was queued last
        self._is_ahead = False  # it was queued behind a launch, ahead of the next one

    def run(self) -> None:
        with exact_sleeps():
            super().run()
        if self._last is not None:
            self._last.wait()  # a prompt that was called off may still be on its way into its slot

    def begin(self, request: Request) -> InSlot:
        one = InSlot(request, request.cached)
        if request.prompt_logprobs is None:
            with self._queue.first():
                one.prompt = self._launcher.prompt(request)
                if one.prompt is None:
                    self._enter(one)
        return one

    def advance(self) -> None:
        """A piece of a prompt that is to be scored, or else a slice of one that a library runs and a launch."""
        with self._queue.first():
            for slot, one in self.running.items():
                if one.words is None and one.prompt is None:
                    return self.attempt(slot, partial(self._score_piece, one))
            if self._run_prompts():
                self._launch()
            elif self._last is not None and self._last.meets:
                self._last.wait()

    def _run_prompts(self) -> bool:
        """A slice of a prompt that a library runs, short ones first; while nobody has a token yet all short ones, and
        those that come meanwhile. Whether a launch is next."""
        if self._is_ahead:
            self._is_ahead = False
            return bool(self._ready())
        runs = self._prompts()
        ahead = [one for run, one in runs.items() if not any(map(run.waits_for, runs))]
        short = [one for one in ahead if one.prompt and one.prompt.short]
        streams = any(one.output for one in self._ready().values())
        for one in short if short and not streams else (short or ahead)[:1]:
            self.attempt(one.request.slot, partial(self._run_slice, one))
        return bool(self._ready()) and not (short and not streams and self.mailbox.waiting())

    def _prompts(self) -> dict[PromptRun, InSlot]:
        return {one.prompt: one for one in self.running.values() if one.prompt is not None}

    def _ready(self) -> dict[int, InSlot]:
        return {slot: one for slot, one in self.running.items() if one.words is not None}

    def _run_slice(self, one: InSlot) -> None:
        """Some of a prompt, or all of several that run together; a request's slot behind the last of its own."""
        if one.prompt is None:
            return
        ready, share = self._ready().values(), self._share
        beside = any(other.output for other in ready) if one.prompt.short else bool(ready)
        if not beside:
            share.alone()
        alone_s = math.inf if one.prompt.short else ALONE_S
        seconds = share.slice_s(time.monotonic()) if beside else alone_s
        self._last = one.prompt
        waiting = self._prompts()
        along = [waiting[run] for run in one.prompt.take_along([*waiting])]
        ended = one.prompt.advance(seconds, not beside)
        for other in along:
            self.attempt(other.request.slot, partial(self._went_on, other, True))
        self._went_on(one, ended)

    def _went_on(self, one: InSlot, ended: bool) -> None:
        """A request whose prompt was run up to a position."""
        assert one.prompt is not None
        filled, last = one.prompt.filled, len(one.request.prompt) - 1
        one.position = min(filled, last)  # the last token runs next, if only through the head
        if ended:
            one.prompt, one.ran_all = None, filled > last
            self._enter(one)

    def _enter(self, one: InSlot) -> None:
        self._launcher.admit(one.request, one.position)
        one.words = self._launcher.words(one.request.slot)
        self._bring_mask(one)

    def _score_piece(self, one: InSlot) -> None:
        """Log-probabilities of the next piece of a prompt; after the last one the request enters its slot."""
        request, first = one.request, one.position
        end = len(request.prompt) - 1  # the logits of the last token are those of the answer
        last = min(first + SCORED, end)
        if first < last:
            rows = self._launcher.score(request, first, last)
            self.mailbox.push_prompt(request.slot, prompt_logprobs(request, rows, first + 1))
            one.position = last
        if last == end:
            self._enter(one)

    def _launch(self) -> None:
        launcher = self._launcher
        before = reached(launcher.device)
        self._leaving = False
        others_wait = bool(self._prompts())
        most = self._share.tokens() if others_wait else None
        if not others_wait:
            self._share.alone()
        # Of the launch alone: a slice may still run before it, and one behind it.
        seconds = Clock(launcher.device) if others_wait else None
        begun = time.monotonic()
        # Tokens that one of its requests has: in one look there may be those of some, in the next the others'. Counted
        # first, since a kernel that runs while it is started (on the interpreter) may end requests.
        ready = self._ready()
        counts = {slot: len(one.output) for slot, one in ready.items()}
        launch = launcher.launch(ready, most)
        before_it = [(ready[slot], counts[slot]) for slot in launch.slots]

        def made() -> int:
            return max(len(one.output) - count for one, count in before_it)

        self._heart = heart = Heart(before, launch.ended)
        try:
            if seconds and launch.aside and not launch.first_tokens:
                seconds.stop()
                self._go_ahead()
            pace, over = Pace(), False
            while not over:
                told = self.poll()
                if told:
                    pace.told(told)  # before questions to the driver, for which callers would wait
                over = launch.ended()
                if heart.listen(launcher.steps()):
                    self.mailbox.beat()
                if launch.outdated() or self._queue.over(time.monotonic() - begun):
                    self._leave()
                if most is not None and made() >= most:
                    self._leave()
                gone = [slot not in self.running for slot in launch.slots]
                ends = self._leaving or (any(gone) if launch.together else all(gone))
                if not (told or over):
                    pace.wait(ends, lambda: self._has_news() or launch.ended())
        except BaseException as error:
            # The kernel must not write into slots that others have got meanwhile.
            self._leave()
            while not isinstance(error, Stalled) and not launch.ended():
                heart.listen(launcher.steps())
                time.sleep(COARSE_S)
            raise
        self.poll()  # what it left behind is complete
        took = seconds() if seconds else time.monotonic() - begun
        self._share.told(took, 0 if launch.first_tokens else made(), beside=others_wait)
        self._settle(launch)

    def _go_ahead(self) -> None:
        """Queue the next slice behind the launch; one that is to end for the host's sake has none. Comes back when the
        slice before the launch has ended."""
        self._hear()
        if not self._leaving and not any(run.meets for run in self._prompts()):
            self._run_prompts()
            self._is_ahead = True

    def poll(self) -> int:
        """Bring over what the kernel wrote, write what it waits for, and have it leave if the host is to speak.

        How many tokens one request got at most.
        """
        told = 0
        for one in list(self.running.values()):
            if one.words is not None:
                told = max(told, self._read(one, one.words))
        self._hear()
        return told

    def _hear(self) -> None:
        """Have the kernel leave if the host is to speak."""
        mailbox = self.mailbox
        if (
            mailbox.stops
            or mailbox.waiting()
            or any(one.error or mailbox.cancelled(slot) for slot, one in self.running.items())
        ):
            self._leave()

    def _leave(self) -> None:
        self._leaving = True
        self._launcher.leave()

    def _has_news(self) -> bool:
        return any(one.words and one.words.tokens[len(one.output)] for one in self.running.values())

    def _read(self, one: InSlot, words: SlotWords) -> int:
        """Tell the tokens that have come since, and how many they are."""
        before = len(one.output)
        while len(one.output) < one.request.max_tokens and one.request.slot in self.running:
            if not self._read_one(one, words, len(one.output) + 1):
                break
        return len(one.output) - before

    def _read_one(self, one: InSlot, words: SlotWords, number: int) -> bool:
        """Whether token `number` had come, or what says why there is none."""
        request, vocab = one.request, self._launcher.spec.vocab_size
        read = read_word(int(words.tokens[number - 1]), number)
        stamp = int(words.stamps[number - 1])
        # a stamp may be on its way: the GPU's stores reach the host in any order
        if read is None or (self._launcher.stamps and not stamp):
            return False
        outcome, token = read
        position = len(request.prompt) + number - 1
        if outcome in (Outcome.NOT_FINITE, Outcome.NOTHING_ALLOWED):
            self.fail(request.slot, one.error or self._no_token(outcome, position))
            return True
        step = Step(token, FINISH.get(outcome), device_ns=stamp)
        if request.params.logprobs is not None:
            best = min(request.params.logprobs, vocab)
            logprobs = read_record(words.records[number - 1], number, best)
            if logprobs is None:
                return False
            logprob, top, rank = logprobs
            step = step._replace(logprob=logprob, top=top, rank=rank)
        one.output.append(token)
        if one.error is None:
            if step.finish is not None:
                one.position = position  # the last token never gets keys and values
            self.tell(one, step)
        if step.finish is None and request.mask is not None:
            self._bring_next_mask(one)
        return True

    def _bring_mask(self, one: InSlot, allowed: bool = False) -> None:
        """The mask of the next token, which the kernel waits for; every id is `allowed` where it is of no use."""
        if one.request.mask is None or one.words is None:
            return
        mask = None if allowed else one.request.mask(one.output)
        self._hear()  # first: with the mask the kernel goes on, and looks again only behind the next token
        one.words.mask[:] = mask_words(mask, self._launcher.spec.vocab_size, len(one.output) + 1)

    def _bring_next_mask(self, one: InSlot) -> None:
        """As `_bring_mask` while the kernel runs; it goes on, though the caller's function fails."""
        begun = time.monotonic()
        try:
            if one.error is None:
                self._bring_mask(one)
                if time.monotonic() - begun > MASK_S:
                    raise slow_mask(MASK_S)
        except Exception as error:
            one.error = error
        if one.error is not None:
            self._bring_mask(one, allowed=True)
        if self._heart is not None:
            self._heart.restart()  # a caller's function is not the GPU's silence

    def _no_token(self, outcome: Outcome, position: int) -> KogError:
        if outcome is Outcome.NOTHING_ALLOWED:
            return nothing_allowed(position)
        if reason := self._launcher.void():
            return RunError(reason)
        half = self._launcher.spec.dtype is DType.F16
        advice = "; float16 holds up to 65504: try --dtype bf16" if half else ""
        return RunError(f"the logits of position {position} hold NaN or +inf: the run is void{advice}")

    def _settle(self, launch: Launch) -> None:
        """After a launch: requests that failed leave; the others stand at a token, from which the next one goes on."""
        result = launch.settle()
        still = [self.running[slot] for slot in launch.slots if slot in self.running]
        error: Exception | None = result.error
        # Of blocks that wait for a mask, and for each other meanwhile, the one whose time is up first says for what.
        late = isinstance(error, LateMask) or (error and any(one.error for one in still))
        # Of a launch that made nothing, the masks were there when it began. Another one would make nothing for ever.
        if late and (
            len(still) < len(launch.slots) or any(result.positions[one.request.slot] > one.position for one in still)
        ):
            error = None
            for one in still:
                self._launcher.take_back(one)
        for one in still:
            slot = one.request.slot
            one.position = result.positions[slot]
            why = error or one.error
            if why is None and slot in result.ended:
                why = RunError("the kernel ended a request and did not say why")
            if why is not None:
                self.fail(slot, why)
        for slot in result.served:
            if slot in self.running:
                self.running[slot] = self.running.pop(slot)
