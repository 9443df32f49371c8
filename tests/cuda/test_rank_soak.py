"""The soak of several GPUs (tests/gpu/rank_soak.py), some requests of it on two emulated ones; and that it sees what
it is to see."""

import dataclasses

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox
from kog_triton.checkpoint.random_weights import RandomWeights
from tests.gpu import rank_soak
from tests.gpu.rank_soak import Found, Soak, requests_of
from tests.lib.cuda_walk import FiberBackend
from tests.lib.ring_walker import f16_spec

REQUESTS = 10


@pytest.fixture(scope="module")
def made():
    backend = FiberBackend(
        RandomWeights(f16_spec(vocab_size=100)), BackendOptions(num_slots=4, num_gpus=2), 2
    )
    backend.settle()
    return Soak(backend, requests_of(backend.spec.vocab_size, 60, (1, 5, 9), (4,)), 4)


def soaked(made, requests=REQUESTS):
    made.found, made.mailbox, made._done, made._broke = Found(), made.mailbox, False, ""
    made._running = {}
    return made.run(lambda: made.found.requests >= requests)


def test_requests_of_every_kind_say_what_they_say_alone(made, monkeypatch):
    monkeypatch.setattr(rank_soak, "YIELDS", 0.3)
    monkeypatch.setattr(rank_soak, "CANCELS", 0.5)
    found = soaked(made)
    assert found.holds, found.line("emulated")
    assert (
        found.requests >= REQUESTS and found.cancelled and found.yields and found.most_at_once > 2
    )
    assert found.line("emulated").startswith("soak holds: emulated, ")


def test_a_word_that_is_another_one_is_a_difference(made, monkeypatch):
    expected = [[*tokens[:-1], tokens[-1] + 1] for tokens in made.expected]
    monkeypatch.setattr(made, "expected", expected)
    found = soaked(made, 4)
    assert found.differences and not found.holds and "prompt of" in found.first_fault


def test_silence_is_a_hang_and_an_error_an_error(made, monkeypatch):
    monkeypatch.setattr(rank_soak, "HANG_S", 0.2)
    monkeypatch.setattr(made, "mailbox", Mailbox())
    monkeypatch.setattr(made.backend, "generate", lambda mailbox: mailbox.take())
    found = soaked(made, 4)
    assert found.hangs and not found.holds

    def fails(mailbox):
        raise RuntimeError("the kernel is gone")

    monkeypatch.setattr(made, "mailbox", Mailbox())
    monkeypatch.setattr(made.backend, "generate", fails)
    found = soaked(made, 4)
    assert found.errors == 1 and "the kernel is gone" in found.first_fault


def test_memory_that_grows_is_told():
    held = Found(gpu_mib=(0.0, 0.0), host_mib_a_minute=0.5)
    assert held.holds
    for changes in ({"gpu_mib": (0.0, 4.0)}, {"host_mib_a_minute": 3.0}, {"hangs": 1}):
        assert not dataclasses.replace(held, **changes).holds
