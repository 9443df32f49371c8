"""The heartbeat of the Triton kernel, in the concurrent interpreter, and what the host does when it stops."""

import gc
import os
import weakref
from dataclasses import replace

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

from kog_triton.backends import compile_log, watchdog
from kog_triton.backends.launch_queue import LaunchQueue
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.serving import Launch, LaunchServing
from kog_triton.backends.triton.kernel.slots import BEAT, HOST, OUTCOME, YIELD
from kog_triton.errors import DeviceError
from tests.lib.silent_gpu import assert_shut
from tests.lib.triton_cases import GREEDY, Case, backend_of, plain, round_robin, serve

ONE = Case(plain(qk_norm=True), 3)


def test_the_heartbeat_counts_the_passes_of_a_launch():
    backend = round_robin(ONE, num_slots=2)
    heard = []

    def listen(mailbox):
        heard.append(int(backend.memory.pointers.mailbox[0, BEAT]))

    requests = [Request(0, (3, 42), GREEDY, 0, 2), Request(1, (12, 7, 8), GREEDY, 0, 1)]
    steps = serve(backend, *requests, host=listen)
    assert [len(one) for one in steps] == [2, 1]
    assert backend.memory.pointers.mailbox[0, BEAT] == 3 + 3
    assert {0, 1, 2} < set(heard)


def test_it_beats_in_prompts_too():
    backend = backend_of(replace(ONE, tokens=tuple(range(3, 17))))
    backend.options = replace(backend.options, prefill="kernel")
    serve(backend, Request(0, tuple(range(3, 17)), GREEDY, 0, 1))
    assert backend.memory.pointers.mailbox[0, BEAT] > 0


def test_the_first_launch_of_each_variant_says_that_it_compiles(monkeypatch, caplog):
    """As the interpreter does in its way, longer than the patience here."""
    monkeypatch.setattr(compile_log, "QUICK_S", 0.0)
    caplog.set_level("INFO", "kog_triton.compilers")
    backend = backend_of(ONE)
    sampled = replace(GREEDY, temperature=1.0, top_p=0.5)
    for params, what in ((GREEDY, "kernel"), (GREEDY, ""), (sampled, "kernel with sampling rules")):
        caplog.clear()
        serve(backend, Request(0, (3,), params, 0, 1))
        if what:
            begun, ended = caplog.messages
            assert begun == f"compiling the Triton {what}, once for this model"
            assert ended.startswith(f"compiled the Triton {what} in ")
        else:
            assert caplog.messages == []


class Mute:
    """A launcher whose kernel leaves after 2,000 looks; `pulse` says the steps that it counts at each."""

    def __init__(self, backend, pulse):
        self._backend, self._pulse, self.asked = backend, pulse, 0
        self._launcher = backend.launcher

    def __getattr__(self, name):
        return getattr(self._launcher, name)

    def launch(self, running, most=None):
        self._backend.memory.pointers.states[0, 0, OUTCOME.value] = 1
        return Launch(list(running), self._done, lambda: self._settle(list(running), list(running)))

    def _done(self):
        self.asked += 1
        self._backend.memory.pointers.mailbox[0, BEAT] = self._pulse(self.asked)
        return self.asked > 2000


@pytest.mark.parametrize("stops", [0, 5])
def test_a_gpu_that_falls_silent_is_told_of_at_once(monkeypatch, stops):
    """Whether it never counted a step or stops at the fifth; who counts on is left alone."""
    backend = backend_of(ONE)
    monkeypatch.setattr(watchdog, "SILENCE_S", 0.05)
    for pulse in (lambda n: min(n, stops), lambda n: n):
        launcher = Mute(backend, pulse)
        mailbox = Mailbox()
        mailbox.post(Request(0, (3, 42), GREEDY, 0, 2))
        serving = LaunchServing(launcher, mailbox, LaunchQueue())
        if pulse(100) == 100:
            serving.run()
            assert launcher.asked > 2000
        else:
            with pytest.raises(watchdog.Stalled, match="has not finished a step in 0 s: open a new LLM"):
                serving.run()
            assert launcher.asked < 2000


def stall(backend, launcher):
    """A request on a GPU that falls silent at once."""
    backend.launcher = launcher
    mailbox = Mailbox()
    mailbox.post(Request(0, (3, 42), GREEDY, 0, 2))
    with pytest.raises(watchdog.Stalled):
        backend.generate(mailbox)


def test_a_backend_whose_gpu_fell_silent_serves_no_more_and_keeps_what_may_be_written(monkeypatch):
    """Until its kernel has ended: then another backend works, and frees it."""
    monkeypatch.setattr(watchdog, "_kept", [])
    backend = backend_of(ONE)
    launcher = Mute(backend, lambda asked: 0)
    with monkeypatch.context() as patched:
        patched.setattr(watchdog, "SILENCE_S", 0.01)
        stall(backend, launcher)
    pointers, asked = backend.memory.pointers, launcher.asked
    assert pointers.mailbox[0, HOST] == YIELD.value
    assert_shut(backend)
    backend.close()
    kept = [weakref.ref(t) for t in (pointers.mailbox, pointers.kv, pointers.words)]
    del backend, pointers
    gc.collect()
    assert all(tensor() is not None for tensor in kept)
    with pytest.raises(DeviceError, match=r"^the GPU has not ended what another model .*$"):
        backend_of(ONE)
    assert launcher.asked <= asked + 1
    launcher.asked = 2000  # it ends after all
    other = backend_of(ONE)
    del launcher
    gc.collect()
    assert all(tensor() is None for tensor in kept)
    assert serve(other, Request(0, (3, 42), GREEDY, 0, 2))[0][-1].finish == "length"


class Torn(Mute):
    """A launcher whose launch fails once a second request has come."""

    def __init__(self, backend):
        super().__init__(backend, lambda asked: asked)

    def launch(self, running, most=None):
        self.mailbox.post(Request(1, (7,), GREEDY, 0, 1))
        return super().launch(running, most)

    def _done(self):
        if self.asked == 2:
            self.asked = 2000
            raise RuntimeError("torn")
        return super()._done()


def test_a_request_that_came_beside_a_launch_that_failed_is_nobody_elses():
    backend = backend_of(ONE, num_slots=2)
    launcher = Torn(backend)
    backend.launcher = launcher
    launcher.mailbox = Mailbox()
    launcher.mailbox.post(Request(0, (3, 42), GREEDY, 0, 2))
    with pytest.raises(RuntimeError, match="torn"):
        backend.generate(launcher.mailbox)
    backend.launcher = None  # there is nothing to launch
    backend.generate(Mailbox())


def test_prompts_that_run_before_a_launch_are_no_silence(monkeypatch):
    now, busy = [0.0], [True]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    one = watchdog.Heart(lambda: not busy[0], lambda: False)
    for now[0] in (20.0, 40.0, 60.0):
        one.listen(0)
    busy[0] = False
    now[0] = 89.0
    one.listen(0)
    now[0] = 91.0
    with pytest.raises(watchdog.Stalled):
        one.listen(0)
