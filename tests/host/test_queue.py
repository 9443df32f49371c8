"""Who waits for a slot and who gets it: threads and tasks that share an LLM, cancels, dropped streams, ends in line."""

import asyncio
import gc
import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kog_triton import LLM, engine
from kog_triton.errors import RequestError, RunError
from tests.lib.fake_backend import GREEDY, FakeBackend, cold

ENDLESS = replace(GREEDY, max_tokens=None)


def await_that(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def text_of(stream):
    """What a stream says; or its error."""
    try:
        return [delta.output for delta in stream][-1].outputs[0]
    except RunError as error:
        return str(error)


class Together:
    """Calls of one function in threads of their own."""

    def __init__(self, function, arguments):
        self.results = [None] * len(arguments)

        def call(i, argument):
            self.results[i] = function(argument)

        self._threads = [
            threading.Thread(target=call, args=(i, argument), daemon=True) for i, argument in enumerate(arguments)
        ]
        for thread in self._threads:
            thread.start()

    def join(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.results


class Patient(FakeBackend):
    """Says nothing to a prompt that begins with "wait" before another one was asked for that begins with "last"."""

    asked: frozenset = frozenset()

    def _advance(self, mailbox, state, words):
        self.asked |= {words[:4]}
        if words.startswith(b"wait") and b"last" not in self.asked:
            assert time.monotonic() < self.deadline, "the last one never came"
            time.sleep(0.001)
            return False
        return super()._advance(mailbox, state, words)


def test_whoever_ends_makes_room_though_another_one_has_said_nothing(folder):
    with LLM(folder, backend=Patient, num_slots=2) as llm:
        llm.engine.backend.deadline = time.monotonic() + 20
        prompts = ["wait say:a", "say:b", "say:c", "last say:d"]
        assert [o.outputs[0].text for o in llm.generate(prompts)] == ["a", "b", "c", "d"]


# ---- sharing ----


def test_threads_and_tasks_that_share_two_slots_get_what_each_gets_alone(folder, llm):
    def conversation(name):
        return [text_of(llm.stream(f"{name} {i}", GREEDY)) for i in range(12)]

    async def task(name):
        outputs = [delta.output async for delta in llm.stream(name, GREEDY)]
        return outputs[-1].outputs[0]

    async def tasks():
        return await asyncio.gather(*(task(f"task {i}") for i in range(10)))

    names = ["thread a", "thread b"]
    threads = Together(conversation, names)
    answers = asyncio.run(tasks())
    for name, said in zip(names, threads.join(), strict=True):
        assert said == [cold(folder, f"{name} {i}") for i in range(12)]
    assert answers == [cold(folder, f"task {i}") for i in range(10)]
    assert (llm.engine.num_free_slots, llm.engine.num_waiting) == (2, 0)
    assert llm.engine.backend.most_at_once == 2


def test_tasks_on_a_real_model_say_what_they_say_alone(folder):
    prompts = ["def f(x):", "import os\n", "class A", "for i in"]
    params = replace(GREEDY, max_tokens=6, ignore_eos=True)

    async def task(llm, prompt):
        return [d.output async for d in llm.stream(prompt, params)][-1].outputs[0].token_ids

    async def tasks(llm):
        return await asyncio.gather(*(task(llm, prompt) for prompt in prompts))

    with LLM(folder, backend="reference", max_model_len=64, num_slots=2) as llm:
        together = asyncio.run(tasks(llm))
        llm.engine.forget()
        alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone


def test_a_loop_of_events_is_free_while_tasks_wait(narrow):
    async def beside():
        waits = asyncio.ensure_future(anext(aiter(narrow.stream("slow b", GREEDY))))
        ticks = 0
        while not waits.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return ticks, (await waits).token_ids

    first = narrow.stream("slow a", GREEDY)
    ticks, ids = asyncio.run(beside())
    assert ids and ticks > 20  # the first took twelve passes of 20 ms
    assert text_of(first).finish_reason == "length"


# ---- the line ----


def test_who_came_first_is_served_first(narrow):
    first = narrow.stream("slow a", ENDLESS)
    streams = [narrow.stream(f"say:{i}", GREEDY) for i in range(5)]
    readers = Together(text_of, streams[::-1])
    first.close()
    assert [said.text for said in readers.join()] == ["4", "3", "2", "1", "0"]
    made = [stream._device_ns[0] for stream in streams]
    assert made == sorted(made)


def test_the_time_in_line_is_told_apart_from_the_prompts(narrow):
    first = narrow.stream("slow a", replace(GREEDY, max_tokens=20, ignore_eos=True))
    second = narrow.stream("b", GREEDY)
    assert (first.metrics().queue_s is None, second.metrics().queue_s) == (False, None)
    (*_, a), (*_, b) = first, second
    waited, m = b.output.metrics.queue_s, b.output.metrics
    assert a.output.metrics.queue_s < 0.2 < 20 * 0.02 <= waited + 0.02 and waited < m.ttft_s
    assert m.prefill_s == m.ttft_s - waited
    assert m.prompt_tokens_per_s == pytest.approx(m.prompt_tokens / m.prefill_s)


def test_a_list_of_many_prompts_lets_others_in_between(narrow):
    prompts = [f"slow say:{i}" for i in range(40)]
    batch = Together(narrow.generate, [prompts])
    await_that(lambda: narrow.engine.num_free_slots == 0)
    assert narrow.generate("say:b", GREEDY)[0].outputs[0].text == "b"
    assert len(narrow.engine.backend.computed) < 10
    (outputs,) = batch.join()
    assert [output.outputs[0].text for output in outputs] == [str(i) for i in range(40)]


def test_a_line_that_is_full_refuses_and_says_what_to_do(folder):
    with LLM(folder, backend=FakeBackend, max_waiting=2) as llm:
        first = llm.stream("slow a", ENDLESS)
        waiting = [llm.stream(f"say:{i}", GREEDY) for i in range(2)]
        for start in (llm.stream, llm.generate):
            with pytest.raises(RequestError, match=r"2 requests wait: try again later, or [^\n]*$"):
                start("b", GREEDY)
        waiting[0].cancel()  # makes room at once, though nobody has read its end
        waiting.append(llm.stream("say:2", GREEDY))
        first.close()
        said = [text_of(stream) for stream in waiting]
        assert [(one.text, one.finish_reason) for one in said] == [("", "abort"), ("1", "stop"), ("2", "stop")]


def test_a_list_waits_where_the_line_is_full_as_long_as_one_of_its_own_runs(folder):
    with LLM(folder, backend=FakeBackend, num_slots=2, max_waiting=0) as llm:
        first = llm.stream("slow a", ENDLESS)
        outputs = llm.generate([f"say:{i}" for i in range(6)], GREEDY)
        first.close()
    assert [o.outputs[0].text for o in outputs] == [str(i) for i in range(6)]


def test_who_waits_can_be_cancelled(narrow):
    first = narrow.stream("slow a", ENDLESS)
    waiting = narrow.stream("slow b", GREEDY)
    reader = Together(text_of, [waiting])
    await_that(lambda: narrow.engine.num_waiting == 1)
    waiting.cancel()
    (said,) = reader.join()
    assert (said.finish_reason, said.token_ids) == ("abort", [])
    assert narrow.engine.num_waiting == 0 and narrow.engine.num_free_slots == 0
    first.close()
    assert narrow.engine.backend.computed == [len("slow a")]


def test_a_task_that_waits_can_be_cancelled(narrow):
    async def give_up(stream):
        async def read():
            async for _ in stream:
                pass

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    first = narrow.stream("slow a", ENDLESS)
    asyncio.run(give_up(narrow.stream("slow b", GREEDY)))
    assert (narrow.engine.num_waiting, narrow.engine.num_free_slots) == (0, 0)
    first.close()
    asyncio.run(give_up(narrow.stream("slow c", ENDLESS)))  # one that runs
    assert narrow.engine.num_free_slots == 1


# ---- nobody reads ----


def test_a_stream_that_is_dropped_before_its_first_read_frees_its_slot(narrow):
    narrow.stream("slow a", ENDLESS)
    gc.collect()
    await_that(lambda: narrow.engine.num_free_slots == 1)
    (slot,) = narrow.engine._slots  # it did not run to the end of the context
    assert len(slot.tokens) < narrow.engine.max_context // 2


def test_a_stream_that_is_dropped_in_line_is_never_served(folder, narrow):
    first = narrow.stream("slow a", ENDLESS)
    narrow.stream("slow b", ENDLESS)
    gc.collect()
    first.close()
    assert narrow.generate("c", GREEDY)[0].outputs[0] == cold(folder, "c")
    assert narrow.engine.backend.computed == [len("slow a"), len("c")]


class Collects(FakeBackend):
    """The collector runs in the engine's thread."""

    def _advance(self, *args):
        gc.collect()
        return super()._advance(*args)


def test_a_loop_that_the_collector_drops_in_the_engine_s_thread_harms_nobody(folder):
    """Its generator is part of a cycle, as the frame of an error that was caught is."""
    gc.disable()
    try:
        with LLM(folder, backend=Collects) as llm:
            cycle = {"loop": iter(llm.stream("slow a", ENDLESS))}
            next(cycle["loop"])
            cycle["self"] = cycle
            reader = Together(text_of, [llm.stream("say:b", GREEDY)])
            del cycle
            assert reader.join()[0].text == "b"
    finally:
        gc.enable()


def test_a_stream_that_nobody_reads_ends_by_itself_and_its_slot_serves_the_next(folder, narrow):
    unread = narrow.stream("slow say:abc", GREEDY)
    assert narrow.generate("slow say:abc", GREEDY)[0].metrics.cached_tokens == 11
    assert text_of(unread) == cold(folder, "slow say:abc")


def test_a_loop_of_events_that_closed_reads_no_more_and_harms_nobody(narrow):
    async def leave(stream):
        return await anext(aiter(stream))

    loop = asyncio.new_event_loop()
    stream = narrow.stream("slow a", replace(GREEDY, max_tokens=20))
    loop.run_until_complete(leave(stream))
    loop.close()
    assert narrow.generate("say:b", GREEDY)[0].outputs[0].text == "b"
    assert stream is not None


# ---- ends ----


def test_closing_ends_who_waits(folder):
    llm = LLM(folder, backend=FakeBackend)
    streams = [llm.stream(f"slow {i}", ENDLESS) for i in range(4)]
    readers = Together(text_of, streams[1:])
    llm.close()
    assert all("the engine was closed" in said for said in [*readers.join(), text_of(streams[0])])


@pytest.mark.parametrize(("word", "says"), [("crash", "RuntimeError: the device is gone"), ("leave", "did not finish")])
def test_who_waits_is_served_after_a_backend_that_failed(folder, llm, word, says):
    with llm.engine.paused():  # all are there before one of them runs
        failing = [llm.stream(f"{word} a", GREEDY), llm.stream("slow neighbour", ENDLESS)]
        waiting = [llm.stream(f"say:{i}", GREEDY) for i in range(5)]
    assert all(says in text_of(stream) for stream in failing)
    assert [text_of(stream).text for stream in waiting] == [str(i) for i in range(5)]
    assert llm.engine.num_free_slots == 2


class Gone(FakeBackend):
    """A backend that can serve nobody any more."""

    def generate(self, mailbox):
        raise RunError("the GPU fell silent")


@pytest.mark.parametrize("last", ["say:a", "fail a", "crash a", "slow a"])
def test_a_listener_that_raises_harms_no_other_request(folder, caplog, last):
    def listener():
        if threading.current_thread().name == "kog-backend" and first._claim.ended:
            raise ValueError("of the listener")

    with LLM(folder, backend=FakeBackend) as llm:
        with llm.engine.paused():
            first = llm.stream(last, GREEDY)
            first.listen(listener)
            waiting = [llm.stream(f"say:{i}", GREEDY) for i in range(2)]
        readers = Together(text_of, waiting)
        assert [said.text for said in readers.join()] == ["0", "1"]
        assert llm.engine.num_free_slots == 1
    assert "of the listener" in caplog.text


def test_a_thread_that_cannot_start_is_an_error_and_leaves_the_slot_free(folder, narrow, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="start new thread"):
        patch.setattr(threading.Thread, "start", start)
        narrow.stream("a", GREEDY)
    assert narrow.engine.num_free_slots == 1
    assert Together(text_of, [narrow.stream("b", GREEDY)]).join() == [cold(folder, "b")]


def test_closing_waits_for_who_has_the_backend_and_nobody_gets_it_afterwards(folder):
    llm = LLM(folder, backend=FakeBackend)
    with llm.engine.paused():
        closing = threading.Thread(target=llm.close, daemon=True)
        closing.start()
        await_that(lambda: llm.engine.closed)
        time.sleep(0.05)
        assert not llm.engine.backend.closed
    closing.join(20)
    assert llm.engine.backend.closed
    with pytest.raises(RunError, match="closed"):
        llm.forward_logits([1])


def test_streams_dropped_in_line_do_not_pile_up(narrow):
    first = narrow.stream("slow a", ENDLESS)
    for _ in range(50):
        narrow.stream("b", GREEDY)
    assert narrow.engine.num_waiting <= 1
    first.close()


def test_an_error_that_stays_reaches_everybody_who_waits(folder):
    with LLM(folder, backend=Gone) as llm:
        streams = [llm.stream(f"say:{i}", GREEDY) for i in range(4)]
        assert [text_of(stream) for stream in streams] == ["the GPU fell silent"] * 4
        assert (llm.engine.num_waiting, llm.engine.num_free_slots) == (0, 1)


@contextmanager
def forked_while_locked(llm):
    """Another thread holds the engine's lock as this process forks: the child's number, 0 in the child, which leaves
    by os._exit. It must leave with 0."""
    held, over = threading.Event(), threading.Event()

    def hold():
        with llm.engine._lock:
            held.set()
            over.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    yield pid
    over.set()
    thread.join()
    assert os.waitpid(pid, 0)[1] == 0


def test_a_forked_process_ends_whoever_held_the_engine_s_lock(narrow):
    with forked_while_locked(narrow) as pid:
        if pid == 0:
            signal.alarm(5)
            engine._end()  # as at its exit
            os._exit(0)


def test_in_a_forked_process_each_use_says_so_and_none_waits(llm):
    """Whoever held the lock, and whatever the threads did that the fork left behind."""
    stream = llm.stream("slow x", ENDLESS)
    stream.poll(None)
    with forked_while_locked(llm) as pid:
        if pid == 0:
            signal.alarm(20)
            uses = (
                lambda: llm.generate("x", GREEDY),
                lambda: llm.stream("x", GREEDY),
                lambda: llm.forward_logits([1]),
                lambda: stream.poll(None),
                stream.close,
            )
            said = []
            for use in uses:
                try:
                    use()
                except RunError as error:
                    said.append(str(error))
            llm.close()
            os._exit(said != ["the LLM was opened before this process was forked: open one in this process"] * 5)
    stream.close()
    assert llm.generate("say:x", GREEDY)[0].outputs[0].text == "x"


def test_after_close_each_use_says_so(llm):
    stream = llm.stream("slow x", ENDLESS)
    llm.close()
    for use in (
        lambda: llm.generate("x", GREEDY),
        lambda: llm.chat([{"role": "user", "content": "x"}], GREEDY),
        lambda: llm.stream("x", GREEDY),
        lambda: llm.forward_logits([1]),
        lambda: list(stream),
    ):
        with pytest.raises(RunError, match=r"the engine (is|was) closed"):
            use()


class Broken(FakeBackend):
    def generate(self, mailbox):
        try:
            raise OSError("of the driver")
        except OSError as error:
            raise RunError("the GPU broke off") from error


@pytest.mark.parametrize("backend, says", [(Broken, "of the driver"), (FakeBackend, "is gone")])
def test_an_error_says_what_it_came_from_and_never_itself(folder, backend, says):
    with LLM(folder, backend=backend) as llm, pytest.raises(RunError) as raised:
        llm.generate("crash", GREEDY)
    assert says in str(raised.value.__cause__)
    assert raised.value.__cause__ is not raised.value


def test_a_failure_is_that_of_its_request_alone(narrow):
    streams = [narrow.stream(prompt, GREEDY) for prompt in ("say:a", "fail b", "say:c")]
    said = [text_of(stream) for stream in streams]
    assert (said[0].text, said[1], said[2].text) == ("a", "NaN in layer 3", "c")
