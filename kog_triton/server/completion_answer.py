"""An answer as /v1/completions tells it: samples of one prompt after the other, perhaps with the prompt before them."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kog_triton.outputs import Logprob, RequestOutput
from kog_triton.server.answering import Events, sse
from kog_triton.server.figures import Offsets, completion_logprobs, progress, timings, token_name, usage
from kog_triton.server.model import ServedModel
from kog_triton.server.problems import Problem
from kog_triton.server.samples import Job, News


@dataclass
class Sample:
    """What was told of one sample."""

    text: list[str] = field(default_factory=list)
    offsets: Offsets | None = None  # of its tokens
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    output: RequestOutput | None = None


class CompletionAnswer:
    """echo  the prompt comes first; `made`: whether what comes behind it was asked for"""

    def __init__(
        self,
        answer_id: str,
        model: ServedModel,
        jobs: list[Job],
        *,
        echo: bool,
        made: bool,
        logprobs: bool,
        include_usage: bool,
    ) -> None:
        self._id, self._model, self._jobs = answer_id, model, jobs
        self._echo, self._made, self._asked = echo, made, logprobs
        self._include_usage = include_usage
        self._created = int(time.time())
        self._samples: defaultdict[int, Sample] = defaultdict(Sample)
        self._events = Events(self._head())
        self._n = jobs[0].params.n
        self._echoed: dict[int, tuple[list[str], list[int]]] = {}

    # ---- a stream ----

    def begin(self) -> bytes:
        return b""

    def event(self, news: list[News], elapsed_s: float) -> bytes:
        return b"".join(self._chunk(one, elapsed_s) for one in news)

    def _chunk(self, one: News, elapsed_s: float) -> bytes:
        sample = self._samples[one.index]
        first = not sample.text
        self._add(one)
        text = one.delta.text if self._made else ""
        told = self._prompt(one.index) + text if first and self._echo else text
        if not told and sample.output is None:
            return b""  # and its log-probabilities come with the text that they are of
        logprobs = self._logprobs(one.index) if self._asked and self._made else None
        sample.logprobs = []
        choice: dict[str, Any] = {"index": one.index, "text": told, "logprobs": logprobs, "finish_reason": None}
        prompt = len(self._jobs[one.index // self._n].token_ids)
        now = progress(one.tokens if self._made else 0, elapsed_s, prompt)
        end: dict[str, Any] = {}
        if sample.output is not None:
            choice["finish_reason"] = sample.output.outputs[0].finish_reason
            end["timings"] = timings(sample.output, self._made)
        return self._events.event({"choices": [choice], "progress": now} | end)

    def last(self) -> bytes:
        end = self._events.event({"choices": [], "usage": self._usage()}) if self._include_usage else b""
        return end + b"data: [DONE]\n\n"

    def error(self, problem: Problem) -> bytes:
        return sse(problem.body())

    def error_body(self, problem: Problem) -> dict[str, Any]:
        return problem.body()

    # ---- an answer at its end ----

    def take(self, news: list[News]) -> None:
        for one in news:
            self._add(one)

    def _add(self, one: News) -> None:
        sample = self._samples[one.index]
        sample.text.append(one.delta.text)
        sample.logprobs += one.delta.logprobs or []
        sample.output = one.delta.output or sample.output

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(index) for index in sorted(self._samples)]
        first = self._samples[0].output
        assert first is not None, "all samples have ended"
        return self._head() | {"choices": choices, "usage": self._usage(), "timings": timings(first, self._made)}

    def _choice(self, index: int) -> dict[str, Any]:
        sample = self._samples[index]
        assert sample.output is not None, "all samples have ended"
        text = "".join(sample.text) if self._made else ""
        prompt = self._prompt(index) if self._echo else ""
        return {
            "index": index,
            "text": prompt + text,
            "logprobs": self._logprobs(index) if self._asked else None,
            "finish_reason": sample.output.outputs[0].finish_reason if self._made else "length",
        }

    def _logprobs(self, index: int) -> dict[str, Any]:
        """Of what was made of a sample since the last look, behind those of an echoed prompt."""
        sample, tokenizer = self._samples[index], self._model.tokenizer

        def name(token: int, text: str) -> str:
            return token_name(tokenizer, token, text)

        made = sample.logprobs if self._made else []
        chosen = [next(iter(candidates.items())) for candidates in made]
        tokens: list[dict[int, Logprob] | None] = [*made]
        names = [name(token, found.decoded_token or "") for token, found in chosen]
        offsets: list[int] = []
        if self._echo:
            # the engine scores a prompt for its first sample alone
            scored = self._samples[index - index % self._n].output
            assert scored is not None, "all samples have ended"
            prompt, ids = scored.prompt_logprobs or [], scored.prompt_token_ids
            tokens = [*prompt, *tokens]
            of_prompt, offsets = self._echoed_tokens(index // self._n, ids)
            names = of_prompt + names
        if sample.offsets is None:
            skips = self._jobs[index // self._n].params.skip_special_tokens
            begin = len(self._prompt(index)) if self._echo else 0
            sample.offsets = Offsets(tokenizer, skips, begin)
        offsets = offsets + [sample.offsets.next(token) for token, _ in chosen]
        return completion_logprobs(tokens, names, offsets, name)

    def _echoed_tokens(self, job: int, ids: Sequence[int]) -> tuple[list[str], list[int]]:
        """Names of a prompt's tokens, and where they begin in its text; made once for all of its samples."""
        if job not in self._echoed:
            tokenizer, prompt = self._model.tokenizer, self._prompt(job * self._n)
            text = Offsets(tokenizer, True)
            begins = [text.next(token) for token in ids]
            more = text.end - len(prompt)  # a space ahead of it, which is not told
            names = [token_name(tokenizer, token, self._model.piece(token)) for token in ids]
            self._echoed[job] = names, [max(0, begin - more) for begin in begins]
        return self._echoed[job]

    def _prompt(self, index: int) -> str:
        job = self._jobs[index // self._n]
        assert job.prompt is not None, "of an echo it is made ahead"
        return job.prompt

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model.name}

    def _usage(self) -> dict[str, Any]:
        outputs = [(i, s.output) for i, s in sorted(self._samples.items()) if s.output is not None]
        return usage(outputs, self._n, made=self._made)
