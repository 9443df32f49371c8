"""The soak of several GPUs (tests/gpu/rank_soak.py), some requests of it on two emulated ones; and that it sees what
it is to see."""

import dataclasses
import gc
import threading
from types import SimpleNamespace

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.prefill import ranks
from kog_triton.checkpoint.random_weights import RandomWeights
from tests.gpu import rank_soak
from tests.gpu.rank_soak import Found, Soak, requests_of
from tests.lib import soak_requests
from tests.lib.cuda_walk import FiberBackend
from tests.lib.rank_outputs import PushedBackend
from tests.lib.ring_walker import f16_spec
from tests.lib.soak_record import Difference, Tally

REQUESTS = 10
PATIENT_S = 120.0  # the first calls compile for the CPU


@pytest.fixture(scope="module")
def made():
    backend = FiberBackend(RandomWeights(f16_spec(vocab_size=100)), BackendOptions(num_slots=4, num_gpus=2), 2)
    backend.settle()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(soak_requests, "MORE", (3, 6))
        patched.setattr(rank_soak, "HANG_S", PATIENT_S)
        asked = requests_of(backend.spec.vocab_size, 60, (1, 5, 9), (4,))
        yield Soak(backend, asked, 4, room=60)


def soaked(made, requests=REQUESTS):
    made.found, made.mailbox, made._done, made._broke = Found(), made.mailbox, False, ""
    made._running, made._holds, made.tally = {}, {}, Tally()
    return made.run(lambda: made.found.requests >= requests)


def test_requests_of_every_kind_say_what_they_say_alone(made, monkeypatch):
    monkeypatch.setattr(rank_soak, "YIELDS", 0.3)
    monkeypatch.setattr(rank_soak, "CANCELS", 0.5)
    found = soaked(made)
    assert found.holds, found.line("emulated")
    assert found.requests >= REQUESTS and found.cancelled and found.yields and found.most_at_once > 2
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


def test_prompts_are_cancelled_between_their_slices(monkeypatch):
    """By a moment: a number of tokens never comes inside a prompt."""
    monkeypatch.setattr(ranks, "RANK_BUCKETS", (6, 24))
    monkeypatch.setattr("kog_triton.backends.cuda.prompts_beside.RANK_BUCKETS", (6, 24))
    options = BackendOptions(num_slots=4, num_gpus=2, prefill="library")
    backend = PushedBackend(RandomWeights(f16_spec(vocab_size=100, num_layers=2)), options, 2)
    backend.settle()
    backend.library.chunk = 7
    monkeypatch.setattr(rank_soak, "HANG_S", PATIENT_S)
    one = Soak(backend, requests_of(100, 60, (30,), (2,)), 4)
    monkeypatch.setattr(rank_soak, "CANCELS", 1.0)
    gc.collect()
    gc.disable()
    try:
        found = one.run(lambda: one.found.inside or one.found.requests >= 12)
        held = [run for run in gc.get_objects() if type(run) is ranks.RankRun]
    finally:
        gc.enable()
    assert not held  # its tensors are those of a whole pass
    assert found.inside and found.cancelled >= found.inside and found.holds
    assert f"({found.cancelled} cancelled, {found.inside} of them inside a prompt, " in found.line("")


def test_a_long_soak_without_a_cancel_inside_a_prompt_proves_nothing():
    assert Found().holds and Found(wants_inside=True, inside=1).holds
    assert not Found(wants_inside=True).holds
    assert Found(wants_inside=True).line("long").startswith("soak FAILED: long")


@pytest.fixture
def differing(made, monkeypatch):
    """Two kinds of request have differed."""
    monkeypatch.setattr(made, "found", Found(differences=2))
    monkeypatch.setattr(made, "tally", Tally())
    monkeypatch.setattr(rank_soak, "TRIES", 1)
    for which, one in list(enumerate(made.asked))[:2]:
        about = (which, one.kind, len(one.request.prompt), 0, "kernel", [], {}, {}, [], 0, 0, 1, 2)
        made.tally.add(one.name, "kernel", lambda about=about: Difference(*about))
    assert len(made.tally.differ) == 2
    return made


def test_what_differs_is_told_before_it_is_asked_again(differing, monkeypatch, capsys):
    kept = []

    def fails(mailbox):
        assert kept, "what was found is kept first"
        raise RuntimeError("no memory")

    monkeypatch.setattr(differing.backend, "generate", fails)
    monkeypatch.setattr(rank_soak, "HANG_S", 0.1)
    rank_soak.tell_and_ask(differing, "emulated", differing, kept.append)
    before, behind = ([one["again"] for one in its["differing"]] for its in kept)
    assert before == [{}, {}]
    assert behind == [{"beside": [], "error": "RuntimeError: no memory"}] * 2
    said = capsys.readouterr().out
    assert 0 < said.index("soak FAILED: emulated") + 1 < said.index("no memory")


def test_a_hang_while_it_asks_again_is_one_and_nobody_uses_the_backend_beside_it(differing, monkeypatch):
    kept, calls, over = [], [], threading.Event()
    monkeypatch.setattr(differing.backend, "generate", lambda mailbox: calls.append(1) or over.wait())
    monkeypatch.setattr(rank_soak, "HANG_S", 0.1)
    rank_soak.tell_and_ask(differing, "emulated", differing, kept.append)
    assert calls == [1] and [its["hangs"] for its in kept] == [0, 1]
    assert "Hung" in differing.tally.kept[0].again["error"] and not differing.tally.kept[1].again
    assert "asked again" in differing.found.first_fault
    again = Soak(differing.backend, differing.asked[:2], 4)
    assert again.found.hangs == 1 and calls == [1, 1], "what it says alone is not waited for longer"
    assert again.run(lambda: False).hangs == 1 and calls == [1, 1]
    over.set()


def test_what_is_said_alone_another_way_is_told(made):
    assert rank_soak.otherwise(made, made) == []
    wrong = SimpleNamespace(expected=[[], *made.expected[1:]])
    assert rank_soak.otherwise(made, wrong) == [made.asked[0].name]


def test_phases_have_graphs_or_none():
    library, short = SimpleNamespace(_graphs={1: 2}), SimpleNamespace(_graphs={3: 4})
    for backend in (SimpleNamespace(library=library, short=None), SimpleNamespace(library=library, short=short)):
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
