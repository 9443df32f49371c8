"""One sample in the making: steps in; log-probabilities, text and stop strings out.

A `Generation` belongs to one thread or one asyncio task, except for `cancel`. Its slot is freed when the backend has
said its last word, also after a stop string, a cancel, an error, or if nobody reads it any more.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import suppress

from kog_triton.backends.mailbox import Failure, PromptLogprob, Request, Step
from kog_triton.claim import Claim
from kog_triton.errors import run_error
from kog_triton.metrics import RequestMetrics
from kog_triton.outputs import FINISH_REASONS, CompletionOutput, Delta, Logprob, RequestOutput
from kog_triton.sampling.params import SamplingParams
from kog_triton.text import Detokenizer, StopMatcher, Tokenizer


class Generation:
    """Iterate over it, with `for` or `async for`, or call `poll` until `finished`.

    measure   metrics.measure for this backend: it takes the rest by keyword
    finished  told the output when there is nothing more to come
    """

    def __init__(
        self,
        claim: Claim,
        prompt: str | None,
        tokenizer: Tokenizer,
        eos_token_ids: Collection[int],
        measure: Callable[..., RequestMetrics],
        finished: Callable[[RequestOutput], None] | None = None,
        request_id: str = "",
    ) -> None:
        self._claim = claim
        self.prompt, self.request_id = prompt, request_id
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._decode, self._eos_token_ids, self._measure = tokenizer.decode, eos_token_ids, measure
        self._tell_finished = finished
        self._text = TextStream(tokenizer, claim.request.params)
        self._texts: list[str] = []
        self._logprobs: list[dict[int, Logprob]] = []
        self._prompt_logprobs: list[dict[int, Logprob] | None] = [None]
        self._cumulative = 0.0
        self._arrivals, self._device_ns = array("d"), array("q")  # 16 bytes a token, not 72
        self._whole: RequestOutput | None = None  # the output, once it is complete

    def __del__(self) -> None:
        self._claim.cancel()  # if it still runs, nobody will read what it says

    @property
    def request(self) -> Request:
        """What the backend was asked; its slot and what was cached are known once it has a slot."""
        return self._claim.request

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __iter__(self) -> Iterator[Delta]:
        """Deltas as they come; leaving the loop early cancels the request."""
        try:
            while not self.finished:
                delta = self.poll(None)
                if delta is not None:
                    yield delta
        except GeneratorExit:
            # Perhaps the collector's, in whichever thread it runs: the one that serves must not wait for itself.
            self._claim.cancel()
            self.finish_reason = self.finish_reason or FINISH_REASONS["cancel"]
            raise
        except BaseException:
            self.close()
            raise
        self.close()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Deltas as they come, on the running event loop; leaving the loop early cancels the request."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # of a loop that has closed: nobody reads any more
                loop.call_soon_threadsafe(news.set)

        self._claim.listen(wake)
        try:
            while not self.finished:
                await news.wait()
                news.clear()
                delta = self.poll(0)
                if delta is not None:
                    yield delta
        finally:
            self._claim.cancel()
            while not self._claim.ended:
                self._claim.read(0)
                await news.wait()
                news.clear()
            self.close()

    def listen(self, news: Callable[[], None]) -> None:
        """Call `news` now and whenever `poll` may have something new, in whichever thread brings it."""
        self._claim.listen(news)

    def cancel(self) -> None:
        """Ask for an early end, from any thread or a signal handler; it ends with "abort"."""
        self._claim.cancel()

    def close(self) -> None:
        """Cancel if it still runs and wait until its slot is free; safe to call twice."""
        self._claim.cancel()
        while not self._claim.ended:
            self._claim.read(None)
        if self.finish_reason is None:
            self.finish_reason = FINISH_REASONS["cancel"]

    @property
    def has_scores(self) -> bool:
        """Whether there are log-probabilities of the prompt that `take_scores`, or else `poll`, has yet to spell."""
        return self._claim.has_prompt

    def take_scores(self) -> None:
        """Spell those that are there: the one part of `poll` that is not short."""
        self._prompt_logprobs += [self._candidates(p) for p in self._claim.read_prompt()]

    def poll(self, timeout: float | None = 0.0) -> Delta | None:
        """What is new, waiting up to `timeout` seconds for it (None: as long as it takes).

        The last delta carries the output. A request that failed raises: RunError, or the KogError
        that the backend gave.
        """
        if self.finished:
            return None
        begun = time.perf_counter()
        left = timeout
        while True:
            if steps := self._claim.read(left):
                return self._accept(steps)
            if timeout is not None:
                left = max(begun + timeout - time.perf_counter(), 0.0)
                if left == 0:
                    return None

    def output(self) -> RequestOutput:
        """What there is so far, as a request of one sample."""
        if self._whole is not None:
            return self._whole
        prompt_ids = list(self.request.prompt)
        whole = len(self._prompt_logprobs) == len(prompt_ids)  # not if cancelled on the way
        asked = self.request.prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=prompt_ids,
            outputs=[self.completion()],
            metrics=self.metrics(),
            finished=self.finished,
            prompt_logprobs=list(self._prompt_logprobs) if asked and whole else None,
        )

    def completion(self) -> CompletionOutput:
        asked = self.request.params.logprobs is not None
        return CompletionOutput(
            index=self.request.sample_idx,
            text="".join(self._texts),
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=list(self._logprobs) if asked else None,
            cumulative_logprob=self._cumulative if asked else None,
        )

    def metrics(self) -> RequestMetrics:
        return self._measure(
            seed=self.request.seed,
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.request.cached,
            submitted=self._claim.submitted,
            queue_s=self._claim.queue_s,
            arrivals=self._arrivals,
            device_ns=self._device_ns,
        )

    # ---- steps to output ----

    def _accept(self, steps: list[Step | Failure]) -> Delta:
        """Turn steps into the next delta; what was made after a stop string is dropped."""
        now, first, texts = time.perf_counter(), len(self.token_ids), []
        if self.request.prompt_logprobs is not None:
            self.take_scores()
        for step in steps:
            if isinstance(step, Failure):
                self.finish_reason = FINISH_REASONS["cancel"]
                raise run_error(step.error)
            texts.append(self._text_of(step, now))
            if self.finished:
                break
        text = "".join(texts)
        self._texts.append(text)
        output = None
        if self.finished:
            self.cancel()  # after a stop string the backend goes on
            output = self._whole = self.output()
            if self._tell_finished is not None:
                self._tell_finished(output)
        return Delta(
            text,
            self.token_ids[first:],
            self._logprobs[first:] if self.request.params.logprobs is not None else None,
            output,
        )

    def _text_of(self, step: Step, now: float) -> str:
        """Take one step in; the text that is certain after it."""
        params, by_token = self.request.params, step.finish == "stop"
        text = ""
        if step.token >= 0:  # a cancel may come without a token
            self.token_ids.append(step.token)
            self._arrivals.append(now)
            self._device_ns.append(step.device_ns)
            if params.logprobs is not None:
                self._logprobs.append(self._candidates(step))
                self._cumulative += step.logprob or 0.0
            if not by_token or params.include_stop_str_in_output:
                text = self._text.push(step.token)
        if step.finish:
            text += self._text.finish()
        if self._text.stop is not None:
            self.finish_reason, self.stop_reason = "stop", self._text.stop
        elif step.finish:
            self.finish_reason = FINISH_REASONS[step.finish]
            # an end token that is ignored as such ends the text as a stop token of the caller
            ends_text = step.token in self._eos_token_ids and not params.ignore_eos
            if by_token and not ends_text:
                self.stop_reason = step.token
        return text

    def _candidates(self, step: Step | PromptLogprob) -> dict[int, Logprob]:
        """The token itself first, then the likeliest."""
        ranks = {step.token: step.rank} | {id: rank for rank, (id, _) in enumerate(step.top, 1)}
        values = {step.token: step.logprob or 0.0} | dict(step.top)
        return {id: Logprob(value, ranks[id], self._spell(id)) for id, value in values.items()}

    def _spell(self, token: int) -> str | None:
        if not self.request.params.detokenize:
            return None
        return self._decode([token], skip_special_tokens=False)


class TextStream:
    """Token ids in, text out, up to the first stop string.

    Stop strings that end within `min_tokens` do not count; text that may still become one is held
    back.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop: str | None = None  # the stop string that was found
        self._detokenize = params.detokenize
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._pieces = Detokenizer(tokenizer, params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop or (), params.include_stop_str_in_output)

    def push(self, token: int) -> str:
        if not self._detokenize:
            return ""
        self._num_tokens += 1
        return self._match(self._pieces.feed(token))

    def finish(self) -> str:
        """What was held back; nothing if a stop string was found."""
        if not self._detokenize or self.stop is not None:
            return ""
        text = self._match(self._pieces.finish())
        return text if self.stop is not None else text + self._matcher.finish()

    def _match(self, text: str) -> str:
        if self._num_tokens <= self._min_tokens:
            return self._matcher.skip(text)
        text = self._matcher.feed(text)
        self.stop = self._matcher.matched
        return text
