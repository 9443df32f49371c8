"""Keeps one engine process running and its requests apart: watches its heartbeat, starts it again when it ended.

    loading ---> ready ---> restarting ---> ready ...      closed
       |                        ^  an engine that died, or stood still while requests ran
       +---> the first engine could not open the model: its error is `start`'s

What an engine had in flight fails with EngineLost; the next request finds the next engine.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from kog_triton.backends.mailbox import Failure, Request
from kog_triton.claim import WAITS, Claim
from kog_triton.errors import KogError, RunError
from kog_triton.sampling.params import SamplingParams
from kog_triton.server import wire
from kog_triton.server.engine_process import EngineProcess
from kog_triton.server.remote_claim import RemoteClaim

log = logging.getLogger(__name__)
WEIGH_S = 1.0  # that the engine may take to say what it holds
WATCH_S = 0.25  # between looks at the heartbeat
SILENT_S = 5.0  # without a heartbeat, or with one that stands still while requests run
SILENT_CPU_S = 60.0  # the reference beats once a layer, but a machine may be loaded, or swap
LONGEST_PAUSE_S = 30.0  # between starts of engines that do not open


class EngineLost(RunError):
    """The engine process ended, or none is there: another one is on its way."""


class Supervisor:
    """options   arguments of LLM
    silent_s  seconds of silence after which an engine is ended; None: SILENT_S, on a CPU SILENT_CPU_S
    gap       gets the seconds between every two tokens of a request"""

    def __init__(
        self, options: dict[str, Any], silent_s: float | None = None, gap: Callable[[float], None] = lambda _: None
    ) -> None:
        self._asked = wire.Open(options)
        self._silent_s, self._gap = silent_s, gap
        self._claims: dict[int, RemoteClaim] = {}
        self._process: EngineProcess | None = None
        self._opened: asyncio.Future[wire.Opened] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._next = 1
        self._held: dict[str, int] = {}
        self._weighing: deque[asyncio.Future[dict[str, int]]] = deque()
        self._beats, self._beaten = -1, 0.0
        self.state = "loading"
        self.num_restarts = 0
        self.beats_total = 0
        self.model: wire.Opened | None = None
        self.kv_tokens: dict[int, int] = {}  # slot -> positions that it holds

    # ---- life ----

    async def start(self) -> wire.Opened:
        """Open the model; the KogError that kept the engine from it."""
        await self._launch()
        assert self._opened is not None
        self.model = await self._opened
        self.state = "ready"
        self._watching = asyncio.create_task(self._watch())
        return self.model

    async def close(self) -> None:
        """End the engine and what it runs; safe to call twice."""
        if self.state == "closed":
            return
        self.state = "closed"
        for task in (self._watching, self._restarting):
            if task is not None:
                task.cancel()
        self._fail_all("the server is shutting down")
        if self._process is not None:
            self._process.kill()
            await self._process.ended()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def num_running(self) -> int:
        return sum(claim.request.slot != WAITS for claim in self._claims.values())

    @property
    def num_waiting(self) -> int:
        return len(self._claims) - self.num_running

    @property
    def heartbeat_age_s(self) -> float:
        """Since the engine last gave a sign that it goes on."""
        return time.monotonic() - self._beaten

    @property
    def kv_usage(self) -> float:
        """The share of all slots' positions that are held, from 0 to 1."""
        if self.model is None:
            return 0.0
        return sum(self.kv_tokens.values()) / (self.model.num_slots * self.model.max_context)

    async def memory_bytes(self) -> dict[str, int]:
        """What the engine holds now, or held when it last said so: one that compiles a grammar does not answer; nothing
        while none is there."""
        if self.state != "ready" or self._process is None:
            return {}
        answer: asyncio.Future[dict[str, int]] = asyncio.get_running_loop().create_future()
        self._weighing.append(answer)
        self._process.send(wire.Weigh())
        try:
            self._held = await asyncio.wait_for(answer, WEIGH_S)
        except TimeoutError:
            log.warning("the engine does not say what it holds")
        return self._held

    # ---- requests ----

    async def submit(
        self, prompt: tuple[int, ...], params: SamplingParams, sample_idx: int, salt: str, most: int = 0
    ) -> RemoteClaim:
        """Put one sample in line, with its own seed in `params`; the engine's error if it refuses."""
        if self.state != "ready" or self._process is None or self.model is None:
            raise EngineLost("the engine is not there: it is starting, try again")
        assert params.seed is not None
        number, self._next = self._next, self._next + 1
        request = Request(
            slot=WAITS,
            prompt=prompt,
            params=params,
            seed=params.seed,
            max_tokens=params.max_tokens or self.model.max_context - len(prompt),
            sample_idx=sample_idx,
            prompt_logprobs=None if sample_idx else params.prompt_logprobs,
        )
        process = self._process
        claim = RemoteClaim(
            request,
            salt,
            partial(self._forget, number),
            partial(process.send, wire.Cancel(number)),
            asyncio.get_running_loop(),
            self._gap,
            most,
        )
        self._claims[number] = claim
        process.send(wire.Start(number, list(prompt), params, sample_idx, salt))
        try:
            await claim.accepted
        except asyncio.CancelledError:
            claim.cancel()
            raise
        return claim

    def _forget(self, number: int, claim: Claim, held: list[int]) -> None:
        self._claims.pop(number, None)
        if claim.request.slot != WAITS:
            self.kv_tokens[claim.request.slot] = len(held)

    # ---- what the engine says ----

    def _told(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Steps):
            self._beaten = time.monotonic()
            if (claim := self._claims.get(message.id)) is not None:
                for step in message.steps:
                    claim.push(step)
        elif isinstance(message, wire.Beat):
            self._hear(message)
        elif isinstance(message, wire.Held):
            self._weighed(message.memory_bytes)
        elif isinstance(message, wire.Opened | wire.NotOpened):
            self._hear_opened(message)
        elif (claim := self._claims.get(message.id)) is not None:
            self._tell(claim, message)

    def _tell(self, claim: RemoteClaim, message: wire.Accepted | wire.Began | wire.Scores | wire.Ended) -> None:
        if isinstance(message, wire.Accepted):
            if not claim.accepted.done():
                claim.accepted.set_result(None)
        elif isinstance(message, wire.Began):
            claim.admit(message.slot, message.cached, message.queue_s)
            self.kv_tokens[message.slot] = len(claim.request.prompt)
        elif isinstance(message, wire.Scores):
            claim.push_prompt(message.tokens)
        else:
            self._fail(claim, wire.error_of(message.kind, message.message))

    def _weighed(self, held: dict[str, int]) -> None:
        if self._weighing and not (asked := self._weighing.popleft()).done():
            asked.set_result(held)

    def _fail(self, claim: RemoteClaim, error: KogError) -> None:
        if not claim.accepted.done():
            claim.accepted.set_exception(error)
        claim.push(Failure(error))

    def _fail_all(self, why: str) -> None:
        for claim in list(self._claims.values()):
            self._fail(claim, EngineLost(why))
        while self._weighing:
            self._weighed({})
        self._claims.clear()
        self.kv_tokens.clear()

    def _hear_opened(self, message: wire.Opened | wire.NotOpened) -> None:
        assert self._opened is not None
        if self._opened.done():
            return
        if isinstance(message, wire.Opened):
            self._beaten = time.monotonic()
            self._opened.set_result(message)
        else:
            self._opened.set_exception(wire.error_of(message.kind, message.message))

    def _hear(self, beat: wire.Beat) -> None:
        """A beat counts unless it stands still while requests have a slot and no compiler runs."""
        if beat.beats != self._beats or not beat.running or beat.compiling:
            self._beaten = time.monotonic()
            self.beats_total += max(beat.beats - max(self._beats, 0), 0)
        self._beats = beat.beats

    # ---- one engine after the other ----

    async def _launch(self) -> None:
        self._opened = asyncio.get_running_loop().create_future()
        self._beats, self._beaten = -1, time.monotonic()
        self._process = process = EngineProcess(self._told, lambda: self._gone(process))
        await process.start(self._asked)

    def _gone(self, process: EngineProcess) -> None:
        if process is not self._process or self.state == "closed":
            return
        lost = EngineLost("the engine process ended before it had opened the model")
        if self._opened is not None and not self._opened.done():
            self._opened.set_exception(lost)
        if self.state == "ready":
            self.state = "restarting"
            self._fail_all("the engine ended while it ran this request, and starts again: send it again")
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        pause = 0.0
        while True:
            self.num_restarts += 1
            assert self._process is not None
            self._process.kill()
            log.error("the engine ended with status %s: another one starts", await self._process.ended())
            await asyncio.sleep(pause)
            pause = min(max(2 * pause, 1.0), LONGEST_PAUSE_S)
            try:
                await self._launch()
                assert self._opened is not None
                self.model = await self._opened
            except (KogError, OSError) as error:
                log.error("the engine could not start again: %s", error)
                continue
            self.state = "ready"
            return

    async def _watch(self) -> None:
        """End an engine that gives no sign; its end does the rest."""
        assert self.model is not None
        limit = self._silent_s
        if limit is None:
            limit = SILENT_CPU_S if self.model.gpu is None else SILENT_S
        while True:
            await asyncio.sleep(WATCH_S)
            if self.state == "ready" and self.heartbeat_age_s > limit and self._process is not None:
                log.error("the engine gave no sign for %.1f s: it is ended", self.heartbeat_age_s)
                self._process.kill()
