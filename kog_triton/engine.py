"""The slots of one backend, and the thread that runs it: where requests start and end.

    prepare -> Job     a prompt and its parameters, checked and resolved
    start -> Claim     one sample in a slot: one that holds its beginning, else the oldest; if all are busy it waits

The backend's `generate` runs in a thread of the engine's own, which lives while requests do and a
second longer. Every method may be called from any thread. A slot remembers the ids whose keys and values it holds, so
that a prompt which starts with them is computed from where they end; an error makes it forget. What a crash of the
backend left behind is not trusted: every slot forgets, and who waits in line goes on with a new mailbox.
"""

import atexit
import contextlib
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kog_triton.backends import Backend, Unready, compiler_threads
from kog_triton.backends.mailbox import Failure, Mailbox, MaskHook, Request
from kog_triton.claim import WAITS, Claim
from kog_triton.errors import RequestError, RunError, TooLong, shown
from kog_triton.metrics import Peak
from kog_triton.request_queue import RequestQueue
from kog_triton.sampling.params import SamplingParams
from kog_triton.text import Tokenizer
from kog_triton.text.grammar import Grammar, Grammars

log = logging.getLogger(__name__)
# How long the engine is without a request before it has the backend make ready what makes later ones faster. A command
# of one request has ended by then.
QUIET_S = 0.25
# How long the thread waits for another request: to start one, and its first CUDA calls, cost a first token
# 0.1 to 0.3 ms. It keeps the engine in memory as long.
LINGER_S = 1.0
MAX_WAITING = 1024  # requests that may wait for a slot
MAX_SLOTS = 1 << 16  # or places in line; beyond any machine: more is a mistake
COMPARED = 512  # ids at once


@dataclass
class Slot:
    """A KV home. `tokens` are the ids whose keys and values it holds, empty while it is claimed."""

    index: int
    tokens: list[int] = field(default_factory=list)
    salt: str = ""  # only prompts with the same salt may reuse them
    last_used: int = 0
    claim: Claim | None = None


@dataclass(frozen=True)
class Job:
    """A checked request: `params` are resolved and `max_tokens` fits the context."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    prompt: str | None = None
    mask: MaskHook | None = None
    cache_salt: str = ""
    grammar: Grammar | None = None  # gives each sample a mask of its own
    request_id: str = ""

    @property
    def seed(self) -> int:
        assert self.params.seed is not None, "resolve() always gives one"
        return self.params.seed


_open_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """A thread that is inside a backend or a compiler when Python ends would abort the process. Engines are closed
    first: an open one may begin to compile.
    """
    for engine in list(_open_engines):
        engine.close()
    compiler_threads.wait()


def _leave_to_parent() -> None:
    """In a forked process: engines are the parent's, and so are their threads and the memory of their GPUs."""
    for engine in list(_open_engines):
        engine.forked = True
    _open_engines.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class Engine:
    """One backend and its slots. `peak` is what MBU compares with, if it is known."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int] = (),
        peak: Peak | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.peak = peak
        self._grammars = Grammars(tokenizer, backend.spec.vocab_size, self.eos_token_ids)
        self.max_context = backend.options.max_context or backend.spec.max_context
        self.closed = False
        self.forked = False  # this process is a child of the one that opened it
        self._slots = [Slot(i) for i in range(backend.options.num_slots)]
        self._queue = RequestQueue(max_waiting)
        self._mailbox: Mailbox | None = None  # none before the first request and after a crash
        self._lock = threading.Condition()
        self._paused = False
        self._inside = False  # the backend is at work
        self.failures = 0  # calls of the backend in a row that it ended by an error of its own
        self._unready: Unready | None = None  # the backend, while it may have something to make ready
        self._thread: threading.Thread | None = None
        self._num_posted = 0
        self._num_uses = 0
        _open_engines.add(self)

    @property
    def kv_cache_bound_bytes(self) -> int:
        """The most that keys and values of all slots take: slots x positions x bytes of one."""
        per_position = self.backend.spec.kv_bytes_per_position
        return len(self._slots) * self.max_context * per_position

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def beats(self) -> int:
        """Another number whenever the backend was seen to go on; it stands still while nothing runs."""
        mailbox = self._mailbox
        return mailbox.beats if mailbox is not None else 0

    def check_ids(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """As the function of that name, for this model's vocabulary."""
        return check_ids(token_ids, self.backend.spec.vocab_size)

    def prepare(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        seed: int | None = None,
        mask: MaskHook | None = None,
        cache_salt: str = "",
        request_id: str = "",
        ends_with_context: bool = False,
    ) -> Job:
        """A request that can run here, or RequestError.

        The seed is `params.seed`, else `seed`, else drawn from the system. `max_tokens` None means
        the rest of the context; more than that is refused, or with `ends_with_context` means the same.
        Only prompts with the same `cache_salt` share keys and values.
        `params.structured_outputs` takes the place of `mask`.
        """
        ids = self.check_ids(prompt_token_ids)
        room = room_behind(len(ids), self.max_context)
        if params.max_tokens is not None and params.max_tokens > room and not ends_with_context:
            raise TooLong(
                f"prompt {len(ids)} + max_tokens {params.max_tokens} exceeds the context of "
                f"{self.max_context} tokens: max_tokens may be at most {room}"
            )
        grammar = None
        if params.structured_outputs is not None:
            if mask is not None:
                raise RequestError("a request has a mask or structured_outputs: leave out one")
            shape = params.structured_outputs
            grammar = self._grammars.compile(*shape.constraint, shape.behind)
        vocab_size = self.backend.spec.vocab_size
        params = params.resolve(vocab_size, self.eos_token_ids, self._encode, seed)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > max_tokens:
            params = replace(params, min_tokens=max_tokens)
        return Job(ids, params, max_tokens, prompt, mask, cache_salt, grammar, request_id)

    def start(self, job: Job, sample_idx: int = 0) -> Claim:
        """Start one sample of a job in a free slot, or behind those that wait for one.

        QueueFull if as many wait as may; RunError if the engine is closed.
        """
        stops = frozenset(job.params.stop_token_ids or ())
        if not job.params.ignore_eos:
            stops |= self.eos_token_ids
        request = Request(
            slot=WAITS,
            prompt=job.prompt_token_ids,
            params=job.params,
            seed=job.seed,
            max_tokens=job.max_tokens,
            stop_token_ids=stops,
            sample_idx=sample_idx,
            # of several samples the first one looks at the prompt, and computes all of it
            prompt_logprobs=None if sample_idx else job.params.prompt_logprobs,
            mask=job.grammar.mask() if job.grammar else job.mask,
        )
        claim = Claim(request, job.cache_salt, self._release, self._withdraw, self._check_process)
        self._check_process()
        with self._lock:
            self._check_open()
            if self._free_slots():
                self._give_slot(claim)
            else:
                self._queue.add(claim)
        return claim

    def get_ready(self) -> None:
        """Have the backend make ready what there is from the next quiet moment on."""
        with self._lock:
            if isinstance(self.backend, Unready) and not self.closed:
                self._unready = self.backend
                self._start_thread()

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    # ---- slots; the lock is held ----

    def _check_process(self) -> None:
        """Before the lock, which a thread of the parent may have held at the fork."""
        if self.forked:
            raise RunError("the LLM was opened before this process was forked: open one in this process")

    def _check_open(self) -> None:
        if self.closed:
            raise RunError("the engine is closed: open a new LLM")

    def _free_slots(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.claim is None]

    def _give_slot(self, claim: Claim) -> None:
        """Give a free slot to a claim and its request to the backend."""
        self._start_thread()
        slot, cached = self._choose_slot(claim)
        slot.claim, slot.tokens, slot.salt = claim, [], claim.salt
        claim.admit(slot.index, cached)
        self._mailbox = self._mailbox or Mailbox()
        self._mailbox.post(claim.request, claim)
        self._num_posted += 1
        self._lock.notify_all()

    def _start_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="kog-backend", daemon=True)
            thread.start()  # first: the system may refuse it
            self._thread = thread

    def _choose_slot(self, claim: Claim) -> tuple[Slot, int]:
        """A free slot and how many leading ids it holds; the last id is always left to compute.

        Reusing a slot saves the tokens kept, and costs the others once their conversation comes
        back: of the slots that would keep at least half of what they hold, the one that keeps most
        is taken, of several that keep as many the one with least to lose. Where there is none an
        empty slot is, and else the least recently used.
        """
        ids = claim.request.prompt[:-1] if claim.request.prompt_logprobs is None else ()
        free = self._free_slots()
        kept = {slot.index: common_prefix(slot.tokens, ids) if slot.salt == claim.salt else 0 for slot in free}
        worth = [s for s in free if 0 < len(s.tokens) <= 2 * kept[s.index]]
        if worth:
            slot = max(worth, key=lambda s: (kept[s.index], -len(s.tokens), -s.last_used))
        else:
            slot = min(free, key=lambda s: (len(s.tokens) > 0, s.last_used))
        return slot, kept[slot.index]

    def _admit(self) -> None:
        """Give free slots to those who have waited longest."""
        self._queue.end_cancelled()
        while self._queue and not self.closed and self._free_slots():
            self._give_slot(self._queue.next())

    # ---- what claims call ----

    def _release(self, claim: Claim, tokens: list[int]) -> None:
        """Free the slot of a claim, if it had one: it now holds the keys and values of `tokens`."""
        if claim.request.slot == WAITS:
            return
        with self._lock:
            slot = self._slots[claim.request.slot]
            self._num_uses += 1
            slot.tokens, slot.claim, slot.last_used = tokens, None, self._num_uses
            self._admit()

    def _withdraw(self) -> None:
        """End cancelled claims that still wait."""
        with self._lock:
            self._queue.end_cancelled()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the backend serves nobody: running requests wait at a token boundary. RunError once closed."""
        self._check_process()
        with self._lock:
            self._lock.wait_for(lambda: not self._paused)
            self._check_open()
            self._paused = True
        try:
            with self._lock:
                if self._mailbox is not None:
                    self._mailbox.yield_now()
                self._lock.wait_for(lambda: not self._inside)
            yield
        finally:
            with self._lock:
                self._paused = False
                if self._mailbox is not None:
                    self._mailbox.resume()
                self._lock.notify_all()

    def _serve(self) -> None:
        """The thread: run the backend until every posted request was served and no other comes."""
        num_served = 0
        while True:
            with self._lock:
                self._inside = False
                self._lock.notify_all()
                self._lock.wait_for(lambda: not self._paused or self.closed)
                if not self.closed and num_served == self._num_posted:
                    self._fail_all(RunError("the request did not finish: the backend left it"))
                    if num_served == self._num_posted and not self._another(num_served):
                        self._thread = None
                        return
                if self.closed:
                    self._fail_all(RunError("the request did not finish: the engine was closed"))
                    self._thread = None
                    return
                if self._paused:
                    continue
                num_served, self._inside = self._num_posted, True
                mailbox = self._mailbox
                assert mailbox is not None, "who posts opens one"
            try:
                self.backend.generate(mailbox)
                self.failures = 0
                if mailbox.yielding:
                    num_served = 0  # what it left resumes with the next call
            except BaseException as error:
                with self._lock:
                    # What the backend left behind is not trusted: no slot's memory, no mailbox.
                    self._mailbox, num_served = None, self._num_posted
                    self.failures += 1
                    self._forget()
                    self._fail_all(error)

    def _another(self, num_served: int) -> bool:
        """Whether a further request came within LINGER_S; the lock is held, and let go meanwhile."""

        def wanted() -> bool:
            return self.closed or self._num_posted != num_served

        if self._unready and not self._lock.wait_for(wanted, QUIET_S):
            self._make_ready(self._unready, lambda: wanted() or self._paused)
        self._lock.wait_for(wanted, LINGER_S)
        return self._num_posted != num_served and not self.closed

    def _make_ready(self, backend: Unready, wanted: Callable[[], bool]) -> None:
        """Until all is, or something else is `wanted`; the lock is held, and let go meanwhile."""
        self._inside = True
        self._lock.release()
        try:
            while self._unready and not wanted():
                if not backend.make_ready():
                    self._unready = None
        except Exception as error:  # of no request: they are served without it
            self._unready = None
            log.warning("what makes later requests faster failed: %s", " ".join(str(error).split()))
        finally:
            self._lock.acquire()
            self._inside = False
            self._lock.notify_all()

    def _fail_all(self, error: BaseException) -> None:
        """End every claim that has a slot; the lock is held."""
        failure = Failure(error if isinstance(error, Exception) else RunError(repr(error)))
        for claim in [slot.claim for slot in self._slots if slot.claim is not None]:
            claim.push(failure)

    def _forget(self) -> None:
        for slot in self._slots:
            slot.tokens = []

    def forget(self) -> None:
        """Drop what free slots remember, so that the next prompt is computed in full."""
        with self._lock:
            self._forget()

    def close(self) -> None:
        """End every request and free the backend; safe to call twice. In a forked process nothing is done."""
        if self.forked:
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
            while self._queue:
                self._queue.next().push(Failure(RunError("the engine was closed: open a new LLM")))
            thread = self._thread
            if self._mailbox is not None:
                self._mailbox.close()
            self._lock.notify_all()
        if thread is not None:
            thread.join()
        with self._lock:
            self._lock.wait_for(lambda: not self._paused)
        self.backend.close()


def room_behind(prompt: int, max_context: int) -> int:
    """Tokens that an answer to a prompt of so many may have; TooLong if none."""
    if prompt >= max_context:
        raise TooLong(
            f"the prompt has {prompt} tokens and the context holds {max_context}: "
            "shorten the prompt to leave room for an answer"
        )
    return max_context - prompt


def check_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The ids as they are; RequestError if there are none or one is outside the vocabulary."""
    if not len(token_ids):
        raise RequestError("the prompt is empty: give at least one token")
    with contextlib.suppress(TypeError):  # of what is no integer, which is named below
        ids = tuple(map(operator.index, token_ids))
        if min(ids) >= 0 and max(ids) < vocab_size:
            return ids
    position, token = next(
        (i, token)
        for i, token in enumerate(token_ids)
        if not (hasattr(token, "__index__") and 0 <= operator.index(token) < vocab_size)
    )
    raise RequestError(f"prompt token {position} is {shown(token)}: ids run from 0 to {vocab_size - 1}")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids are the same. In pieces: one by one, 12,000 take 0.4 ms of a first token."""
    most = min(len(a), len(b))
    for begin in range(0, most, COMPARED):
        end = min(begin + COMPARED, most)
        if list(a[begin:end]) != list(b[begin:end]):
            return next(i for i in range(begin, end) if a[i] != b[i])
    return most
