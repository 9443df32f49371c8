"""Engines of one process that share a GPU, and a GPU whose driver kills kernels that last: the CUDA backend on a CPU.

A real GPU runs one kernel of requests at a time. So does this one: engines that share a queue launch one after another.
"""

from contextlib import contextmanager

import pytest
import torch

from kog_triton.backends import launch_queue
from kog_triton.backends.launch_queue import LaunchQueue
from tests.lib.cuda_requests import COUNT, PROMPTS, Server, alone_by_prompt, assert_alone, ended, make, request, run
from tests.lib.cuda_walk import FiberBackend
from tests.lib.ring_walker import f16_spec

LONG = 24  # tokens, of some milliseconds each


@pytest.fixture(scope="module")
def expected():
    return alone_by_prompt(f16_spec(), PROMPTS[:2], LONG)


@pytest.fixture
def short_quanta(monkeypatch):
    monkeypatch.setattr(launch_queue, "QUANTUM_S", 0.01)


def share(queue, *backends):
    for backend in backends:
        backend._entry.queue = queue


def test_a_request_of_another_engine_does_not_wait_for_the_end_of_one(short_quanta, expected):
    first, second = make(FiberBackend), make(FiberBackend)
    share(LaunchQueue(), first, second)
    long = Server(first, request(0, PROMPTS[0], LONG))
    long.read(0, 2)
    steps = run(second, request(0, PROMPTS[1]))[0]
    assert not ended(long.steps[0]) and long.thread.is_alive()
    assert_alone(second, 0, PROMPTS[1], steps, expected, COUNT)
    assert_alone(first, 0, PROMPTS[0], long.finish()[0], expected)
    assert 1 < first.kernel.launches < 30


def test_logits_of_another_engine_do_not_wait_for_the_end_of_one(short_quanta, expected):
    first, second = make(FiberBackend), make(FiberBackend)
    alone = second.forward_logits([5, 17, 60])
    share(LaunchQueue(), first, second)
    long = Server(first, request(0, PROMPTS[0], LONG))
    long.read(0, 2)
    assert (second.forward_logits([5, 17, 60]) == alone).all()
    assert not ended(long.steps[0]) and long.thread.is_alive()
    assert_alone(first, 0, PROMPTS[0], long.finish()[0], expected)


def test_two_long_requests_of_two_engines_go_on_side_by_side(short_quanta, expected):
    engines = make(FiberBackend), make(FiberBackend)
    share(LaunchQueue(), *engines)
    servers = [Server(e, request(0, PROMPTS[i], LONG)) for i, e in enumerate(engines)]
    for i, server in enumerate(servers):
        server.finish()
        assert_alone(engines[i], 0, PROMPTS[i], server.steps[0], expected)
        assert engines[i].kernel.launches > 2


def test_a_driver_that_kills_kernels_gets_short_ones(expected):
    unbounded, bounded = make(FiberBackend), make(FiberBackend)
    share(LaunchQueue(0.01), bounded)
    for backend in (unbounded, bounded):
        steps = run(backend, request(0, PROMPTS[0], LONG))[0]
        assert_alone(backend, 0, PROMPTS[0], steps, expected)
    assert unbounded.kernel.launches == 1 < bounded.kernel.launches


def test_every_entry_point_is_on_the_backends_own_stream(monkeypatch):
    """Whatever is launched, and what is queued before and after it."""
    inside, launched = [], []

    @contextmanager
    def on_stream(self):
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr("kog_triton.backends.gpu_entry.GpuEntry.on_stream", on_stream)
    sound = FiberBackend._load

    def load(self, *arguments):
        kernel = sound(self, *arguments)
        real = kernel.launch

        def noted(*call):
            launched.append(bool(inside))
            return real(*call)

        kernel.launch = noted
        return kernel

    monkeypatch.setattr(FiberBackend, "_load", load)
    backend = make(FiberBackend)
    state = {"token_ids": torch.tensor([3])}
    entry_points = (
        lambda: run(backend, request(0, PROMPTS[0], COUNT)),
        lambda: backend.forward_logits([1, 2]),
        lambda: backend.run_stage("embed", 0, state),
        lambda: backend.time_stage("embed", 0, state, lambda: launched.append(bool(inside))),
        lambda: backend.profile([1, 2], 2),
    )
    for entry_point in entry_points:
        launched.clear()
        entry_point()
        assert launched and all(launched)
    assert not inside


def test_who_is_interrupted_in_the_line_leaves_it(monkeypatch):
    """Else every other engine would wait for it, 30 seconds a launch."""
    queue = LaunchQueue()
    with queue.first():

        def interrupted(*given):
            raise KeyboardInterrupt

        monkeypatch.setattr(queue._lock, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), queue.first():
            pass
        assert not queue.over(1.0)
