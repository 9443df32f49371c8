"""What the routes share: the engine, the model, who may enter, and what is counted."""

import asyncio
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from kog_triton.engine import room_behind
from kog_triton.errors import TooLong
from kog_triton.server.admission import Admission
from kog_triton.server.metrics import ServerMetrics
from kog_triton.server.model import ServedModel
from kog_triton.server.pacing import Interval
from kog_triton.server.problems import Problem
from kog_triton.server.samples import Job, Samples
from kog_triton.server.supervisor import Supervisor
from kog_triton.text.grammar import fault_of, try_constraint

CHARACTERS_A_TOKEN = 64  # at most, over a whole text: longer tokens are of spaces alone


@dataclass
class Service:
    supervisor: Supervisor
    metrics: ServerMetrics
    admission: Admission
    interval: Interval = field(default_factory=Interval)
    keep_alive_s: float = 15.0  # of silence in a stream until a comment is sent, 0 for none
    opened: ServedModel | None = None
    # One check at a time runs: those that wait hold no thread that texts are encoded in.
    _checker: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, "kog-grammar"))

    @property
    def model(self) -> ServedModel:
        """Problem 503 until it is open."""
        if self.opened is None:
            raise Problem(503, "the model is loading: try again", code="loading", retry=True)
        return self.opened

    def check_name(self, name: str) -> None:
        """Problem 404 for another model than the one that is served; none is that one."""
        if name and name not in self.model.names:
            raise Problem(
                404,
                f"no model {name[:100]!r} here: have {', '.join(self.model.names)[:200]}",
                code="model_not_found",
                param="model",
            )

    async def encode(self, text: str, add_special_tokens: bool = True, bounded: bool = True) -> list[int]:
        """Ids of a text, in a thread: a long one takes a second. `bounded`: as of asked.render."""
        self.check_length(len(text))
        most = self.model.opened.max_context if bounded else None
        return await asyncio.to_thread(self.model.tokenizer.encode, text, add_special_tokens, most)

    def check_length(self, characters: int) -> None:
        """TooLong for a text that cannot fit the context, before anything is made of it."""
        most = self.model.opened.max_context
        if characters > CHARACTERS_A_TOKEN * most:
            raise TooLong(
                f"the prompt has {characters} characters and the context holds {most} tokens: shorten the prompt"
            )

    def check_rooms(self, jobs: list[Job]) -> None:
        """TooLong for a prompt that leaves no room for an answer, before its ids travel to the engine."""
        for job in jobs:
            room_behind(len(job.token_ids), self.model.opened.max_context)

    async def check_shapes(self, jobs: list[Job]) -> None:
        """RequestError for a constraint that is invalid, or too much for a process that is bounded; where it is made of
        tools' schemas, Problem 400."""
        loop = asyncio.get_running_loop()
        for shape, of_tools in {(job.params.structured_outputs, job.calls_a_tool) for job in jobs}:
            if shape is None:
                continue
            if not of_tools:
                await loop.run_in_executor(self._checker, try_constraint, *shape.constraint)
            elif wrong := await loop.run_in_executor(self._checker, fault_of, *shape.constraint):
                raise Problem(
                    400, f"the parameters of a tool that must be called are no schema to follow: {wrong}", param="tools"
                )

    def samples(self, jobs: list[Job], interval: Interval) -> Samples:
        return Samples(self.supervisor, self.model, self.metrics, jobs, interval)
