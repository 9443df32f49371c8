"""Every interleaving of small kernels in weak memory, their programs made of what kernels declare; faults are caught.

What exchanges.py proves by knowledge is searched here state by state. docs/SYNC.md says what the machine stands for.
"""

from dataclasses import replace

import pytest

from kog_triton.backends.cuda.layout.collectives import POLICIES
from kog_triton.errors import ModelError
from kog_triton.model.spec import Head, Reduce
from kog_triton.schedule.exchanges import (
    Exchange,
    Kernel,
    Mark,
    Of,
    Reader,
    Who,
    check_kernel,
    fewest_buffers,
)  # fmt: skip
from kog_triton.schedule.schedule import Scope
from tests.lib.exchange_cases import KERNELS, MODELS, change, kernel_of
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.protocol_model import Machine, Op, programs_of
from tests.lib.rank_programs import all_reduces, pass_exchanges

OWN, DELAYED = Reduce.OWN, Reduce.DELAYED
HANGS = "all wait for ever"


def plain(which, layers=3):
    return replace(kernel_of(MODELS["plain"], which), layers=layers)


def late_lanes(which, delay):
    """Two lanes whose attention adds what the other sent `delay` layers ago, in all layers but the first ones."""
    reduces = (OWN,) * delay + (DELAYED,) * 2
    own = (OWN,) * len(reduces)
    spec = mixed_lanes(Head.MEAN, num_layers=len(reduces), delay=delay, reduce_attention=reduces, reduce_mlp=own)
    return replace(kernel_of(spec, which), lanes=2)


# ---- a layer's words ----

LAYER = {
    "decode": ("qkv", "splits", "mlp", "attention_out", "mlp_out"),
    "columns": ("mlp", "mlp_flags", "attention_out", "mlp_out"),
    "triton": ("qkv", "splits", "attention", "mlp", "attention_out", "mlp_out"),
    "prompt": ("x", "qkv", "attention_vectors", "mlp", "arrivals"),
}


@pytest.mark.parametrize("which", KERNELS)
def test_words_of_one_buffer_are_never_overtaken(which):
    layers = 1 if which == "prompt" else 3
    kernel = plain(which, layers)
    machine = Machine(programs_of(kernel, LAYER[which], tokens=4 - layers))
    assert machine.explore() == "" and machine.states > 100


def test_three_blocks_agree_with_two():
    assert Machine(programs_of(plain("decode"), ("qkv", "mlp_out"), blocks=3)).explore() == ""


@pytest.mark.parametrize("which", KERNELS[:-1])
def test_words_whose_readers_never_answer_are_overtaken(which):
    assert Machine(programs_of(plain(which), ("qkv",))).explore() == HANGS


def test_a_reader_that_does_not_wait_for_outputs_is_caught():
    kernel = change(plain("decode"), "mlp_out", readers=())
    assert Machine(programs_of(kernel, ("qkv", "mlp_out"))).explore() == HANGS


def test_a_phase_that_does_not_flip_is_caught():
    still = [
        [replace(op, value=(op.value[0], 1)) if op.value[0] >= 0 else op for op in program]
        for program in programs_of(plain("decode"), ("qkv", "mlp_out"))
    ]
    assert "taken for" in Machine(still).explore()


@pytest.mark.parametrize(("which", "name"), [("decode", "argmax"), ("triton", "argmax")])
def test_candidates_take_turns_with_two_buffers(which, name):
    kernel = plain(which, layers=0)
    end = kernel.ends.index(("candidate", "argmax"))
    assert Machine(programs_of(kernel, (name,), 4, 3, end)).explore() == ""
    single = change(kernel, name, buffers=1)
    assert Machine(programs_of(single, (name,), 4, 3, end)).explore() == HANGS


# ---- a late lane ----


@pytest.mark.parametrize(
    ("which", "delay", "name"),
    [
        ("decode", 1, "attention_out_delayed"),
        ("decode", 2, "attention_out_delayed"),
        ("triton", 1, "attention_out_delayed"),
        ("columns", 1, "attention_out_sent"),
        ("columns", 2, "attention_out_sent"),
    ],
)
def test_a_late_lane_is_never_overtaken(which, delay, name):
    kernel = late_lanes(which, delay)
    names = (name, "mlp_out")
    assert Machine(programs_of(kernel, names, 3, 1)).explore() == ""
    fewer = change(kernel, name, buffers=kernel.exchange(name).buffers - 1)
    assert Machine(programs_of(fewer, names, 3, 1)).explore() == HANGS


def test_late_outputs_that_leave_before_the_others_came_are_overtaken():
    """As test_exchanges.py proves: with three times the delay, a lane at a token's first layers is too fast."""
    name = "attention_out_delayed"
    kernel = late_lanes("decode", 1)
    (late,) = kernel.exchange(name).readers
    kernel = change(kernel, name, readers=(replace(late, step="o_proj_sum"),))
    assert Machine(programs_of(kernel, (name, "mlp_out"), 3, 1)).explore() == HANGS
    enough = change(kernel, name, buffers=fewest_buffers(kernel, name))
    check_kernel(enough)
    assert Machine(programs_of(enough, (name, "mlp_out"), 3, 1)).explore() == ""


# ---- what nobody reads ----


def test_a_word_that_nobody_reads_must_land_before_its_successor_is_waited_for():
    """The one thing that no order gives: an old use of the same phase would be taken. docs/SYNC.md says what does."""
    seldom = Exchange("seldom", "a", (Reader("b", layers=(2,)),), 1)
    more = (Exchange("first", "b", (Reader("c"),), 1, buffers=2), Exchange("second", "c", (Reader("d"),), 1, buffers=2))
    kernel = Kernel(1, 3, (seldom, *more), ("a", "b", "c", "d"), ((),))
    check_kernel(kernel)
    programs = programs_of(kernel, ("seldom", "first", "second"), tokens=2)
    assert Machine(programs).explore() == "seldom: use 0 taken for 2"
    assert Machine(programs, patience=2).explore() == ""


# ---- words that a flag alone tells of: publish_block ----

DATA, FLAG = ("data", 0, 0), ("flag", 0, 0)
STORE = [Op("store", (f"data {i}", 0, i), (0, 1)) for i in range(2)]
RAISE = Op("store", FLAG, (0, 1))
FENCE, DRAIN, BARRIER = Op("fence"), Op("drain"), Op("barrier")
READ = [Op("wait", FLAG, (0, 1)), FENCE, *(Op("load", s.word, s.value) for s in STORE)]
PUBLISH = {  # what the two threads of a block do; the first raises the flag
    "nvidia": ([STORE[0], BARRIER, FENCE, RAISE], [STORE[1], BARRIER]),
    "amd": ([STORE[0], DRAIN, BARRIER, FENCE, RAISE], [STORE[1], DRAIN, BARRIER]),
}


def published(vendor, first, second, read=READ):
    return Machine([first, second, read], (0, 0, 1), vendor).explore()


@pytest.mark.parametrize("vendor", PUBLISH)
def test_a_block_publishes_by_barrier_fence_flag(vendor):
    assert published(vendor, *PUBLISH[vendor]) == ""


@pytest.mark.parametrize(
    ("vendor", "first", "second", "read"),
    [
        ("nvidia", [STORE[0], BARRIER, RAISE, FENCE], [STORE[1], BARRIER], READ),
        ("nvidia", [STORE[0], BARRIER, RAISE], [STORE[1], BARRIER], READ),
        ("nvidia", [STORE[0], FENCE, BARRIER, RAISE], [STORE[1], BARRIER], READ),
        ("nvidia", [STORE[0], FENCE, RAISE], [STORE[1]], READ),
        ("nvidia", *PUBLISH["nvidia"], [op for op in READ if op != FENCE]),
        ("nvidia", *PUBLISH["nvidia"], READ[1:]),
        ("amd", *PUBLISH["nvidia"], READ),
    ],
    ids=[
        "flag before fence",
        "no fence",
        "fence before barrier, by one thread",
        "no barrier",
        "no fence of the reader's",
        "a reader that does not wait",
        "no drain on AMD",
    ],
)
def test_other_ways_to_publish_are_caught(vendor, first, second, read):
    assert "taken for" in published(vendor, first, second, read)


@pytest.mark.parametrize("name", ["splits", "x"])
def test_fences_of_the_declarations_are_needed(name):
    which = "columns" if name == "splits" else "prompt"
    tells = "attention_flags" if name == "splits" else "arrivals"
    kernel = plain(which, 1)
    assert Machine(programs_of(kernel, (name, tells))).explore() == ""
    for fence in kernel.fences:
        if fence.layers is None:
            fewer = tuple(f for f in kernel.fences if f != fence)
            found = Machine(programs_of(replace(kernel, fences=fewer), (name, tells))).explore()
            assert found.startswith(f"{name}: ")


def test_rows_of_all_lanes_are_waited_for():
    """The machine itself: a reader OWN of another lane, and not of its own."""
    kernel = late_lanes("decode", 1)
    waits = [op for op in programs_of(kernel, ("attention_out_delayed",), 1, 1)[0] if op.kind == "wait"]
    assert {op.word[2] for op in waits} == {1}
    assert kernel.exchange("attention_out_delayed").readers[0].of is Of.OWN


# ---- ranks: words in every rank's own memory ----


@pytest.mark.parametrize(
    ("names", "layers", "end", "blocks"),
    [
        (("attention_out_now", "mlp_out_now"), 2, 0, 1),
        (("attention_out_now", "mlp_out"), 3, 0, 1),
        (("argmax",), 0, 1, 1),
        pytest.param(("mlp_out_now",), 2, 0, 2, marks=pytest.mark.slow),
    ],
)
def test_sums_and_candidates_of_two_ranks_are_never_overtaken(names, layers, end, blocks):
    """Words of one use land in each rank's memory when they like. With one buffer they are, unless another sum of
    both answers."""
    spec = MODELS["plain"].replace(vocab_size=100)
    kernel = replace(kernel_of(spec, "decode", ranks=2), layers=layers)
    assert kernel.ends[1] == ("candidate", "argmax")
    tokens = 3 if layers == 0 else 2 if blocks == 1 else 1
    assert Machine(programs_of(kernel, names, tokens, blocks, end, ranks=True)).explore() == ""
    fewer = change(kernel, names[0], buffers=1)
    found = Machine(programs_of(fewer, names, tokens, blocks, end, ranks=True)).explore()
    assert (found == HANGS) == (names[1:] != ("mlp_out_now",))


# ---- ranks of KCCL's collectives ----

RANKS = {  # policy, and what else: the smallest sizes in which every buffer and phase comes round
    **{f"{name}, two ranks": (name, {"uses": 6}) for name in POLICIES},
    **{f"{name}, two blocks": (name, {"ranks": 1, "blocks": 2, "uses": 6}) for name in POLICIES},
    **{f"{name}, delayed": (name, {"delay": 2, "uses": 8}) for name in POLICIES},
    "phase, three ranks": ("phase", {"ranks": 3, "uses": 3}),
    "poison, delayed, two blocks": ("poison", {"ranks": 1, "blocks": 2, "delay": 2, "uses": 8}),
}


@pytest.mark.parametrize("name", RANKS)
def test_ranks_are_never_overtaken(name):
    policy, sizes = RANKS[name]
    machine = Machine(all_reduces(POLICIES[policy], **sizes))
    assert machine.explore() == "" and machine.states > 50


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_of_two_blocks_are_never_overtaken(policy):
    assert Machine(all_reduces(POLICIES[policy], blocks=2, uses=2)).explore() == ""


@pytest.mark.parametrize(
    ("policy", "fault", "says"),
    [
        ("phase", {"buffers": 1}, HANGS),
        ("epoch", {"buffers": 1}, HANGS),
        ("poison", {"buffers": 2, "ranks": 1, "blocks": 2}, HANGS),
        ("phase", {"buffers": 3, "delay": 2, "uses": 6}, HANGS),
        ("epoch", {"buffers": 3, "delay": 2, "uses": 6}, HANGS),
        ("poison", {"buffers": 5, "delay": 2, "uses": 8, "ranks": 1, "blocks": 2}, HANGS),
        ("phase", {"still": True}, "taken for"),
        ("poison", {"clears": False}, "taken for"),
        ("poison", {"fence": False}, HANGS),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_mutants_between_ranks_are_caught(policy, fault, says):
    assert says in Machine(all_reduces(POLICIES[policy], **fault)).explore()


@pytest.mark.parametrize(("ranks", "uses"), [(2, 5), (3, 2)])
def test_sums_of_a_pass_are_never_overtaken(ranks, uses):
    machine = Machine(pass_exchanges(ranks, uses))
    assert machine.explore() == "" and machine.states > 50


@pytest.mark.parametrize("fault", [{"buffers": 1}, {"release": False}, {"acquire": False}], ids=str)
def test_mutants_of_a_pass_between_ranks_are_caught(fault):
    assert "taken for" in Machine(pass_exchanges(**fault)).explore()


def collective_kernel(policy, ranks, delay=0, chosen=False, uses=6):
    """`uses` all-reduces of all blocks of all ranks over and over, as the schedule's walk: a lane for a rank.

    delay   how many uses later sums are fetched, before a step sends its own; 0: at once
    chosen  with a number that one block sends to all after each
    """
    steps, readers = ("send", "fetch"), (Reader("fetch"),)
    if delay:
        steps = ("send",)
        readers = (
            Reader("send", layers=tuple(range(delay, uses)), delay=delay),
            Reader("send", layers=tuple(range(delay)), delay=delay - uses, tokens=1),
        )
    buffers = policy.buffers * max(1, delay)
    exchanges = (Exchange("sums", "send", readers, 1, ranks, buffers, policy.mark, scope=Scope.ALL),)
    if chosen:
        steps += ("choose", "take")
        one = {"mark": Mark.NUMBER, "who": Who.ONE, "scope": Scope.ALL}
        exchanges += (Exchange("chosen", "choose", (Reader("take"),), 2, **one),)
    return Kernel(ranks, uses, exchanges, steps, ((),))


@pytest.mark.parametrize("delay", [0, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_buffers_between_ranks_are_proved(policy, delay):
    """As many as include/kccl has, and for words that are never emptied none fewer."""
    kernel = collective_kernel(POLICIES[policy], 2, delay)
    check_kernel(kernel)
    buffers = kernel.exchange("sums").buffers
    assert fewest_buffers(change(kernel, "sums", buffers=1), "sums") == 2 * max(1, delay)
    assert buffers == (3 if policy == "poison" else 2) * max(1, delay)


def test_a_broadcast_that_nobody_answers_is_refused():
    kernel = collective_kernel(POLICIES["phase"], 2, chosen=True)
    check_kernel(kernel)
    alone = replace(kernel, exchanges=kernel.exchanges[1:], layer=("choose", "take"))
    with pytest.raises(ModelError, match="choose could rewrite one before take has read it"):
        check_kernel(alone)
