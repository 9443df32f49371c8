"""The samples of one HTTP request: started one after the other, read together, told at the stream's pace."""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from kog_triton.errors import RunError
from kog_triton.generation import Generation
from kog_triton.outputs import Delta
from kog_triton.sampling.params import SamplingParams
from kog_triton.server.metrics import ServerMetrics
from kog_triton.server.model import ServedModel
from kog_triton.server.pacing import Interval, Pacing
from kog_triton.server.remote_claim import RemoteClaim
from kog_triton.server.supervisor import Supervisor

# Tokens that wait for a client who does not read, 200 bytes each; the socket's buffers hold 6 s of a stream before.
MAX_UNREAD = 1024


@dataclass(frozen=True)
class Job:
    """One prompt and what is asked of it; `params.n` samples."""

    prompt: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str = ""
    calls_a_tool: bool = False  # structured_outputs are those of a tool's call


@dataclass(slots=True)
class News:
    """What is new of one sample. `index` counts the samples of all jobs, in order."""

    index: int
    delta: Delta
    tokens: int  # of this sample until now


class SlowReader(RunError):
    """The client does not read what it asked for."""


class Samples:
    """`start`, then iterate until all have ended; `cancel` at any time, and always at the end.

    As many are in line at once as there are slots, so that others come in between.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        model: ServedModel,
        metrics: ServerMetrics,
        jobs: list[Job],
        interval: Interval,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._supervisor, self._model, self._metrics = supervisor, model, metrics
        self._most = interval.tokens
        seeds = [model.seeds.getrandbits(32) if job.params.seed is None else job.params.seed for job in jobs]
        self._waiting = deque(
            (i * job.params.n + s, job, seed, s)
            for i, (job, seed) in enumerate(zip(jobs, seeds, strict=True))
            for s in range(job.params.n)
        )
        self._running: dict[int, tuple[Generation, RemoteClaim]] = {}
        self._pacing = Pacing(interval)
        self._news = asyncio.Event()
        self._resting = False  # until the pace allows the next event
        self._telling = False  # an event that the client's socket has not taken yet
        self._overrun = False
        self.cancelled = False
        self._starting = False  # one is on its way into the line
        self.done: dict[int, Generation] = {}
        self._clock = clock
        self.started = clock()

    async def start(self) -> None:
        """Put the first ones in line; the error of one that is refused."""
        try:
            while self._waiting and len(self._running) < self._model.opened.num_slots:
                await self._start_next()
        except BaseException:
            self.cancel()
            raise

    async def _start_next(self) -> None:
        index, job, seed, sample_idx = self._waiting.popleft()
        self._starting = True
        try:
            claim = await self._supervisor.submit(
                job.token_ids, self._model.with_seed(job.params, seed), sample_idx, job.cache_salt, self._most
            )
        finally:
            self._starting = False
        if self.cancelled:  # meanwhile
            self._leave(claim)
            return
        generation = self._model.generation(claim, job.prompt)
        self._running[index] = generation, claim
        generation.listen(partial(self._heard, claim))

    def cancel(self) -> None:
        """End what runs; nothing more is read. Without effect once all have ended."""
        self.cancelled = bool(self._running or self._waiting or self._starting)
        self._waiting.clear()
        for generation, claim in self._running.values():
            if not generation.finished:  # by its error, which is counted as that
                self._leave(claim)
        self._running.clear()
        self._news.set()

    def _leave(self, claim: RemoteClaim) -> None:
        """End one whose client has left; it is counted with the engine's last word of it, once."""

        def heard() -> None:
            if claim.ended:
                claim.listen(lambda: None)
                self._metrics.aborted(claim)

        claim.cancel()
        claim.listen(heard)

    def _heard(self, claim: RemoteClaim) -> None:
        # what waits for the pace, up to 65,536 tokens or those of 10 s, is the client's own wish
        most = MAX_UNREAD + self._most
        if self._telling and claim.num_unread > most and not claim.cancelled:
            self._overrun = True
            claim.cancel()
        if not self._resting or claim.ended:
            self._news.set()

    async def __aiter__(self) -> AsyncIterator[list[News]]:
        """Lists of news, one list an event."""
        while self._running:
            await self._due()
            if self._overrun:
                raise SlowReader("the client did not read its stream: it was ended")
            if news := await self._read():
                self._pacing.sent(self._clock())
                self._telling = True
                yield news
                self._telling = False
            while self._waiting and len(self._running) < self._model.opened.num_slots:
                await self._start_next()

    async def _due(self) -> None:
        """Until there is something to tell and the pace allows it."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._unread():
                await self._news.wait()
            self._news.clear()
            if self.cancelled:
                return
            pause = self._pacing.wait(self._unread(), self._clock())
            if pause <= 0 or self._overrun or any(c.ended for _, c in self._running.values()):
                return
            if math.isinf(pause):
                await self._news.wait()
                continue
            self._resting = True
            timer = loop.call_later(pause, self._news.set)
            try:
                await self._news.wait()
            finally:
                self._resting = False
                timer.cancel()
            return

    def _unread(self) -> int:
        return max([claim.num_unread for _, claim in self._running.values()], default=0)

    async def _read(self) -> list[News]:
        found = []
        for index, (generation, claim) in list(self._running.items()):
            while generation.has_scores:  # in a thread: those of a long prompt take seconds
                await asyncio.to_thread(generation.take_scores)
            if self.cancelled:  # meanwhile
                break
            try:
                delta = generation.poll(0)
            except Exception:
                if generation.finished:  # else `cancel` counts it
                    self._metrics.broken_off(claim)
                raise
            if delta is not None:
                if delta.output is not None:
                    self._metrics.finished(delta.output)
                found.append(News(index, delta, len(generation.token_ids)))
            if generation.finished:
                del self._running[index]
                self.done[index] = generation
        return found
