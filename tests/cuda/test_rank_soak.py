"""The soak of several GPUs (tests/gpu/rank_soak.py), some requests of it on two emulated ones; and that it sees what
it is to see."""

import dataclasses
from types import SimpleNamespace

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox
from kog_triton.checkpoint.random_weights import RandomWeights
from tests.gpu import rank_soak
from tests.gpu.rank_soak import Found, Soak, requests_of
from tests.lib.cuda_walk import FiberBackend
from tests.lib.ring_walker import f16_spec
from tests.lib.soak_record import Tally

REQUESTS = 10


@pytest.fixture(scope="module")
def made():
    backend = FiberBackend(
        RandomWeights(f16_spec(vocab_size=100)), BackendOptions(num_slots=4, num_gpus=2), 2
    )
    backend.settle()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rank_soak, "MORE", (3, 6))
        asked = requests_of(backend.spec.vocab_size, 60, (1, 5, 9), (4,))
        yield Soak(backend, asked, 4, room=60)


def soaked(made, requests=REQUESTS):
    made.found, made.mailbox, made._done, made._broke = Found(), made.mailbox, False, ""
    made._running, made.tally = {}, Tally()
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
    assert sum(made.tally.all.values()) == found.requests and not made.tally.differ


def test_a_further_turn_begins_with_what_its_slot_holds(made, monkeypatch):
    further = [one for one in made.asked if one.after >= 0]
    assert further and {one.kind for one in further} == {"further"}
    for one in further:
        before, said = made.asked[one.after].request, made.expected[one.after]
        assert one.request.prompt[: one.request.cached + 1] == (*before.prompt, *said)
    monkeypatch.setattr(rank_soak, "FOLLOWS", 1.0)
    monkeypatch.setattr(rank_soak, "CANCELS", 0.0)
    found = soaked(made, 16)
    assert found.holds and {what for what, _ in made.tally.all} & {one.name for one in further}


def test_a_word_that_is_another_one_is_a_difference(made, monkeypatch):
    expected = [[*tokens[:-1], tokens[-1] + 1] for tokens in made.expected]
    monkeypatch.setattr(made, "expected", expected)
    found = soaked(made, 4)
    assert found.differences and not found.holds and "prompt of" in found.first_fault
    monkeypatch.setattr(rank_soak, "MOST_ASKED", 2)
    monkeypatch.setattr(rank_soak, "TRIES", 1)
    made.ask_again()
    one = made.tally.kept[0]
    assert one.again["alone"] is False and one.again["beside"] == [False] * rank_soak.TRIES
    assert (one.got, one.expected) == (one.expected - 1, one.got + 1) and one.way == "kernel"
    greedy = [one.again for one in made.tally.kept if one.kind in ("greedy", "further")]
    # The expected word is not the best: no rounding, but a word that is wrong.
    assert all(again["gap"] < 0 < again["best two"] for again in greedy if "gap" in again)
    count, asked = sum(made.tally.differ.values()), sum(made.tally.all.values())
    assert made.tally.lines()[-1] == f"  {count} of {asked} differ: all of kernel"
    assert made.tally.told()["differing"][0]["beside"] == one.beside


def test_what_is_said_alone_another_way_is_told(made):
    assert rank_soak.otherwise(made, made) == []
    wrong = SimpleNamespace(expected=[[], *made.expected[1:]])
    assert rank_soak.otherwise(made, wrong) == [made.asked[0].name]


def test_phases_have_graphs_or_none():
    library, short = SimpleNamespace(_graphs={1: 2}), SimpleNamespace(_graphs={3: 4})
    for backend in (
        SimpleNamespace(library=library, short=None),
        SimpleNamespace(library=library, short=short),
    ):
        with rank_soak.graphs(backend, False):
            assert library._graphs == {} and short._graphs == ({} if backend.short else {3: 4})
        with rank_soak.graphs(backend, True):
            assert library._graphs == {1: 2} and short._graphs == {3: 4}
    assert len({phase.name for phase in rank_soak.PHASES}) == len(rank_soak.PHASES)


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
