"""When a stream speaks, on a clock that only the test moves: exact at any rate, on any machine."""

import asyncio
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest

from kog_triton.backends.mailbox import Failure, PromptLogprob, Request, Step
from kog_triton.errors import RunError
from kog_triton.generation import Generation
from kog_triton.server import answering
from kog_triton.server.completion_answer import CompletionAnswer
from kog_triton.server.http_protocol import ABORT
from kog_triton.server.metrics import ServerMetrics
from kog_triton.server.model import ServedModel
from kog_triton.server.pacing import Interval
from kog_triton.server.remote_claim import RemoteClaim
from kog_triton.server.routes.completions import _job
from kog_triton.server.samples import MAX_UNREAD, Job, Samples, SlowReader
from kog_triton.server.schemas.completions import CompletionBody
from kog_triton.server.wire import Opened
from kog_triton.text import Tokenizer
from tests.lib.fake_checkpoint import END
from tests.lib.fake_time import run

X = ord("x")


class FakeSupervisor:
    """Plays `count` tokens a sample, one each `gap` seconds, or all at once, the first after `wait`."""

    def __init__(self, count, gap, wait=0.1, error=None):
        self.count, self.gap, self.wait, self.error = count, gap, wait, error
        self.cancelled, self.most_at_once, self.running = [], 0, 0
        self.metrics = ServerMetrics()
        self.players = []

    async def submit(self, prompt, params, sample_idx, salt, most=0):
        loop = asyncio.get_running_loop()
        request = Request(-1, prompt, params, params.seed, 1 << 20, sample_idx=sample_idx)
        cancel = partial(self.cancelled.append, sample_idx)
        gap = self.metrics.inter_token.observe
        claim = RemoteClaim(request, salt, self._ended, cancel, loop, gap, most)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        self.players.append(loop.create_task(self._play(claim)))
        return claim

    def _ended(self, claim, held):
        self.running -= 1

    async def _play(self, claim):
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.wait)
        start = loop.time()
        for i in range(self.count):
            if self.gap:
                await asyncio.sleep(start + i * self.gap - loop.time())
            now = int(loop.time() * 1e9) + 1
            if self.error is not None and i == self.count - 1:
                claim.push(Failure(self.error))
            else:
                last = i == self.count - 1
                claim.push(Step(END if last else X, "stop" if last else None, device_ns=now))


@pytest.fixture(scope="module")
def model(checkpoint):
    from kog_triton.checkpoint.folder import Checkpoint

    spec = Checkpoint.open(checkpoint).spec
    opened = Opened(str(checkpoint), spec, {}, [END], "fake", "", 2, 512, None, None, 0.0, 0)
    return ServedModel(opened, Tokenizer.load(checkpoint), ("fake",))


async def told(supervisor, model, interval, n=1, hold=None):
    """[(time, [tokens of each news]), ...] of all events; `hold` waits at each of them."""
    loop = asyncio.get_running_loop()
    params = model.default_params(n=n, temperature=1.0)
    jobs = [Job(None, (1, 2, 3), params)]
    samples = Samples(supervisor, model, supervisor.metrics, jobs, interval, loop.time)
    await samples.start()
    found = []
    async for news in samples:
        found.append((loop.time(), [len(one.delta.token_ids) for one in news]))
        if hold is not None:
            await hold(samples)
    return found


def test_at_3000_tokens_a_second_an_event_each_ten_ms_has_them_all(model):
    events = run(told(FakeSupervisor(2995, 1 / 3000), model, Interval()))
    assert events[0] == (pytest.approx(0.1), [1])  # at once, and alone
    gaps = [b - a for (a, _), (b, _) in pairwise(events)]
    assert max(gaps) < 0.0104
    assert min(gaps[:-1]) > 0.0099
    assert len(events) in range(100, 103)
    assert all(29 <= sum(tokens) <= 31 for _, tokens in events[1:-1])
    assert sum(sum(tokens) for _, tokens in events) == 2995
    assert events[-1][0] == pytest.approx(0.1 + 2994 / 3000)  # the end waits for nothing


def test_a_slow_stream_says_each_token_as_it_comes(model):
    events = run(told(FakeSupervisor(21, 0.05), model, Interval()))
    assert [tokens for _, tokens in events] == [[1]] * 21
    assert [time for time, _ in events] == pytest.approx([0.1 + 0.05 * i for i in range(21)])


@pytest.mark.parametrize(("tokens", "counts"), [(1, [1] * 101), (40, [1, 40, 40, 20])])
def test_an_interval_in_tokens_is_exact(model, tokens, counts):
    events = run(told(FakeSupervisor(101, 1 / 3000), model, Interval(tokens=tokens)))
    assert [sum(found) for _, found in events] == counts


def test_tokens_that_come_all_at_once_are_cut_all_the_same(model):
    events = run(told(FakeSupervisor(20, 0), model, Interval(tokens=7)))
    assert [sum(found) for _, found in events] == [1, 7, 7, 5]


def test_tokens_that_came_while_the_client_was_slow_are_told_one_by_one_still(model):
    async def late(samples):
        await asyncio.sleep(0.01)

    events = run(told(FakeSupervisor(51, 1 / 3000), model, Interval(tokens=1), hold=late))
    assert [sum(found) for _, found in events] == [1] * 51


def test_samples_wait_for_slots(model):
    supervisor = FakeSupervisor(31, 1 / 1000)
    events = run(told(supervisor, model, Interval(), n=5))
    assert supervisor.most_at_once == 2
    assert sum(sum(tokens) for _, tokens in events) == 5 * 31
    assert not supervisor.cancelled


def test_a_client_that_does_not_read_is_ended(model):
    async def stuck(samples):
        await asyncio.sleep(10)

    supervisor = FakeSupervisor(MAX_UNREAD * 2, 1 / 3000)
    with pytest.raises(SlowReader, match="did not read"):
        run(told(supervisor, model, Interval(), hold=stuck))
    assert supervisor.cancelled == [0]


@pytest.mark.parametrize("interval", [Interval(tokens=5000), Interval(seconds=2.0)])
def test_tokens_that_wait_for_the_pace_alone_end_nobody(model, interval):
    """At more tokens an event than a client may leave unread."""
    assert MAX_UNREAD < 5000
    events = run(told(FakeSupervisor(5120, 1 / 2500), model, interval))
    assert [sum(found) for _, found in events] == pytest.approx([1, 5000, 119], abs=1)


def test_a_client_that_leaves_ends_all_samples(model):
    async def leave(samples):
        """While the stream waits for tokens, or for the next event's time."""
        asyncio.get_running_loop().call_later(0.005, samples.cancel)

    supervisor = FakeSupervisor(100, 0.01)
    for interval in (Interval(), Interval(tokens=1)):
        supervisor.cancelled.clear()
        events = run(told(supervisor, model, interval, n=4, hold=leave))
        assert len(events) == 1
        assert sorted(supervisor.cancelled) == [0, 1]


def test_a_client_that_leaves_while_a_sample_is_put_in_line_ends_that_one_too(model):
    class Slow(FakeSupervisor):
        async def submit(self, prompt, params, sample_idx, *more):
            claim = await super().submit(prompt, params, sample_idx, *more)
            if sample_idx == 2:
                self.leave()
                await asyncio.sleep(0.01)
            return claim

    async def hold(samples):
        supervisor.leave = samples.cancel

    supervisor = Slow(3, 0.01)
    run(told(supervisor, model, Interval(tokens=1), n=3, hold=hold))
    assert 2 in supervisor.cancelled


def test_the_seed_of_a_session_repeats_what_its_requests_draw(model):
    class Noting(FakeSupervisor):
        async def submit(self, prompt, params, *more):
            seeds.append(params.seed)
            return await super().submit(prompt, params, *more)

    drawn = []
    for seed in (7, 7, 8):
        seeds = []
        session = replace(model, seeds=Random(seed))
        for _ in range(2):
            run(told(Noting(2, 0.01), session, Interval()))
        drawn.append(seeds)
    assert drawn[0] == drawn[1] != drawn[2] and len({*drawn[0]}) == 2


def test_an_error_comes_behind_what_was_made(model):
    found = []

    async def note(samples):
        found.append(samples)

    with pytest.raises(RunError, match="broke"):
        run(told(FakeSupervisor(4, 0.05, error=RunError("it broke")), model, Interval(), hold=note))
    assert len(found) == 3


@pytest.mark.parametrize("own", [True, False])
def test_a_sample_that_breaks_off_is_counted_once(model, monkeypatch, own):
    """By an error of its own, which is counted as that, or by one of the server's, which leaves it to be aborted."""
    supervisor = FakeSupervisor(4, 0.05, error=RunError("it broke") if own else None)
    if not own:
        monkeypatch.setattr(Generation, "_accept", lambda generation, steps: {}[0])

    async def broken():
        samples = Samples(
            supervisor,
            model,
            supervisor.metrics,
            [Job(None, (1, 2, 3), model.default_params(temperature=1.0))],
            Interval(),
        )
        await samples.start()
        with pytest.raises(RunError if own else KeyError):
            async for _ in samples:
                pass
        samples.cancel()
        await supervisor.players[0]

    run(broken())
    told = {(s.name, *s.labels.values()): s.value for family in supervisor.metrics.collect() for s in family.samples}
    assert told["kog:generation_tokens_total",] == (3 if own else 4)
    assert told["kog:request_success_total", "abort"] == (0 if own else 1)


def test_times_between_tokens_are_counted_by_the_backends_stamps(model):
    supervisor = FakeSupervisor(101, 0.0004)
    run(told(supervisor, model, Interval()))
    (family,) = supervisor.metrics.inter_token.families("x", "x")
    values = {s.labels["le"]: s.value for s in family.samples if "le" in s.labels}
    assert (values["0.0003"], values["0.0005"], values["+Inf"]) == (0, 100, 100)
    assert sum(float(le) < 0.005 for le in values) >= 8


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing_loses_its_connection(monkeypatch, stream):
    """A send that does not end is found by a look now and then, and the connection is cut, which ends the send."""
    monkeypatch.setattr(answering, "SEND_S", 0.2)

    class Told:
        cancelled, started = False, 0.0

        async def __aiter__(self):
            yield ["news"]

        def cancel(self):
            self.cancelled = True

    class Bytes:
        begin = staticmethod(lambda: b"")
        event = staticmethod(lambda news, elapsed_s: b"data: x\n\n")
        last = staticmethod(lambda: b"data: [DONE]\n\n")
        take = staticmethod(lambda news: None)
        whole = staticmethod(lambda: {"text": "x"})

    async def run():
        cut, sent = asyncio.Event(), []

        async def send(message):
            sent.append(message)
            if message.get("body"):
                await cut.wait()  # as uvicorn's, of a connection whose buffers are full

        async def receive():
            await cut.wait()
            return {"type": "http.disconnect"}

        metrics = ServerMetrics()
        answer = answering.Answer(Told(), Bytes(), metrics, ExitStack(), stream=stream, keep_alive_s=0, ignored=[])
        begun = time.perf_counter()
        await asyncio.wait_for(answer({"type": "http", ABORT: cut.set}, receive, send), 10)
        return time.perf_counter() - begun

    assert 0.2 <= asyncio.run(run()) < 5


class Scoring(FakeSupervisor):
    async def _play(self, claim):
        claim.request = replace(claim.request, prompt_logprobs=1)
        claim.push_prompt([PromptLogprob(98, -0.5, ((99, -0.1),), 2)])
        await super()._play(claim)


def test_a_prompt_that_is_echoed_is_decoded_beside_the_event_loop(model, monkeypatch):
    """A long one with its log-probabilities takes seconds, in which every stream would wait."""
    decode, on_loop, sent = Tokenizer.decode, set(), []

    def noted(self, ids, **how):
        if threading.current_thread() is threading.main_thread():
            on_loop.update(ids)
        return decode(self, ids, **how)

    async def send(message):
        sent.append(message.get("body", b""))

    async def ask():
        body = CompletionBody(prompt=[97, 98], echo=True, logprobs=1, max_tokens=0)
        jobs = [await _job(SimpleNamespace(model=model), body, body.prompt, "")]
        told = CompletionAnswer("", model, jobs, echo=True, made=False, logprobs=True, include_usage=False)
        metrics = ServerMetrics()
        samples = Samples(Scoring(1, 0, 0), model, metrics, jobs, Interval())
        await samples.start()
        answer = answering.Answer(samples, told, metrics, ExitStack(), stream=False, keep_alive_s=0, ignored=[])
        await answer({}, asyncio.Event().wait, send)

    monkeypatch.setattr(Tokenizer, "decode", noted)
    asyncio.run(ask())
    assert b'"text":"ab","logprobs":{"tokens":["a","b"]' in b"".join(sent)
    assert not on_loop & {97, 98, 99}


def test_who_leaves_while_a_prompt_is_spelled_hears_no_more(model, monkeypatch):
    take = Generation.take_scores

    async def ask():
        jobs = [Job(None, (97, 98), model.default_params(temperature=1.0))]
        samples = Samples(Scoring(1, 0, 0), model, ServerMetrics(), jobs, Interval())
        loop = asyncio.get_running_loop()

        def leave(generation):
            loop.call_soon_threadsafe(samples.cancel)
            take(generation)

        monkeypatch.setattr(Generation, "take_scores", leave)
        await samples.start()
        return [news async for news in samples]

    assert asyncio.run(ask()) == []
