"""Module outputs of a prompt's pass by kernels instead of copies, the kernels' own C++ on a CPU: the same bits, padded
or in chunks, behind a pass that was called off, and a rank that does not come is named."""

import math
import re

import pytest
import torch

from kog_triton.backends.cuda.backend import WAIT_NS
from kog_triton.backends.cuda.layout.rank_outputs import BLOCKS, render_rank_outputs
from kog_triton.backends.cuda.rank_outputs import LAST, outputs_bytes
from kog_triton.backends.prefill.ranks import bucket_bytes
from kog_triton.schedule.schedule import build
from tests.lib.cuda_walk import ROOT
from tests.lib.machine_code import instructions, is_local, sass_of_text
from tests.lib.prefill_cases import BF16, SPECS, tokens_of
from tests.lib.rank_outputs import exchange_of as pushed
from tests.lib.rank_prefill_cases import empty_caches, rank_prefill_of

CASES = [("biases", 2), ("lanes of all kinds", 2)]


def exchange_of(name, ranks):
    return pushed(build(SPECS[name], ranks))


def opened(name, ranks, exchange=None, buckets=(), chunk=7):
    return rank_prefill_of(name, ranks, BF16, chunk, exchange=exchange, buckets=buckets)


def left(made, name, ranks, ids, first=0, caches=None):
    each = build(SPECS[name], ranks).shards_per_rank
    caches = empty_caches(name, ranks, BF16) if caches is None else caches
    streams = [torch.full((each, SPECS[name].hidden_size), torch.nan) for _ in range(ranks)]
    made.begin(ids, first, caches, streams).advance(math.inf)
    return caches, streams


def equal(ones, others):
    return all(
        torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        for one, other in zip(ones, others, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_outputs_by_kernels_leave_what_copies_leave(name, ranks):
    own, ours = opened(name, ranks), opened(name, ranks, exchange_of(name, ranks))
    want, got = (left(made, name, ranks, tokens_of(9)) for made in (own, ours))
    assert equal(got, want)
    run_of = ours.begin(tokens_of(20), 0, empty_caches(name, ranks, BF16))
    run_of.advance(0.0), run_of.advance(0.0)
    assert run_of.meets and not own.begin(tokens_of(2), 0, want[0]).meets
    del run_of  # called off between pieces
    assert equal(left(ours, name, ranks, tokens_of(9)), want)
    assert ours.gave_up() == ""


def test_a_padded_pass_leaves_its_tokens_alone():
    name, ranks = CASES[0]
    own, ours = (opened(name, ranks, chunk=64), opened(name, ranks, exchange_of(name, ranks), (12, 64)))
    (want, last), (got, ends) = (left(made, name, ranks, tokens_of(9)) for made in (own, ours))
    for mine, other in zip(got, want, strict=True):
        assert mine[..., 9:, :].isnan().all(), "padding stays where it is"
        mine, other = mine[..., :9, :].float(), other[..., :9, :].float()
        assert (mine - other).norm() < 0.02 * other.norm()
    for mine, other in zip(ends, last, strict=True):
        assert (mine - other).norm() < 0.02 * other.norm()
    held = ours.memory_bytes() - own.memory_bytes()
    exchange = outputs_bytes(build(SPECS[name], ranks))
    assert held == ranks * exchange + sum(b.nbytes for b in ours._buckets)
    assert ours._buckets[0]._cache.nbytes == bucket_bytes(build(SPECS[name], ranks), 128) // 128 * 64


def test_a_rank_that_does_not_come_is_named_and_the_next_pass_runs():
    name, ranks = CASES[0]
    exchange = exchange_of(name, ranks)
    ours = opened(name, ranks, exchange)
    want = left(ours, name, ranks, tokens_of(5))
    right = exchange.ends[1]._pushes
    exchange.ends[1]._pushes = lambda stream: None
    _, streams = left(ours, name, ranks, tokens_of(5))
    assert streams[0].isnan().any(), "what is void is no number"
    exchange.ends[1]._pushes = right
    assert equal(left(ours, name, ranks, tokens_of(5)), want)
    assert ours.gave_up() == (  # behind a pass to which all came
        "a wait of a prompt's pass expired: rank 0, exchange 1: nothing from rank 1"
    )
    assert ours.gave_up() == ""


def test_behind_an_end_in_vain_nothing_is_stored_until_all_have_ended():
    """A rank that is late may still read the pass before: what comes next is void, and told."""
    name, ranks = CASES[0]
    exchange = exchange_of(name, ranks)
    ours, (one, other) = opened(name, ranks, exchange), exchange.ends
    want, nowhere = left(ours, name, ranks, tokens_of(5)), torch.zeros(BLOCKS, dtype=torch.int64)
    push, every = one._pushes, exchange._memory[1].every
    late, kept = other._pushes, []

    def leaves_late(stream):
        right = other._push.arrived[0]
        if other._push.index == LAST:
            other._push.arrived[0] = nowhere.data_ptr()
        late(stream)
        other._push.arrived[0] = right

    def watched(stream):
        before = every.clone()
        push(stream)
        kept.append(torch.equal(every, before))

    other._pushes = leaves_late
    assert equal(left(ours, name, ranks, tokens_of(5)), want)
    one._pushes = watched
    for ends in (False, True):
        other._pushes = late if ends else leaves_late
        _, streams = left(ours, name, ranks, tokens_of(6))
        assert all(kept) and all(s.isnan().any() for s in streams)
    assert equal(left(ours, name, ranks, tokens_of(5)), want) and not all(kept)
    assert ours.gave_up() == ("a wait of a prompt's pass expired: rank 0, its end: nothing from rank 1")
    assert ours.gave_up() == ""


def test_a_pass_that_fails_on_one_rank_lets_the_others_go(monkeypatch):
    name, ranks = CASES[0]
    exchange = exchange_of(name, ranks)
    ours = opened(name, ranks, exchange)
    want = left(ours, name, ranks, tokens_of(5))

    def fails(o):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(exchange.ends[1], "send", fails)
        with pytest.raises(RuntimeError, match="no memory"):
            left(ours, name, ranks, tokens_of(5))
        assert [end._push.index for end in exchange.ends] == [LAST] * ranks
    assert equal(left(ours, name, ranks, tokens_of(5)), want) and ours.gave_up() == ""


def test_a_product_is_patient_longer_than_a_kernel_waits_for_a_rank():
    """One that is resident behind a wait for a late GPU: a trap there would end every engine of the process."""
    text = (ROOT / "backends/cuda/prompt.cu").read_text()
    assert int(re.search(r"kPatience = (\d+);", text)[1]) > 2 * WAIT_NS


def test_numbers_grow_from_pass_to_pass():
    assert LAST > 2 * 126 + 1  # the most layers of a model that is known


def test_their_machine_code_orders_what_other_gpus_read():
    """Data as 16 bytes, then a fence and a release of scope system; reads by acquire, and nothing in local memory."""
    text = render_rank_outputs() + (ROOT / "backends/cuda/rank_outputs.cu").read_text()
    code = [what for _, what in instructions(sass_of_text(text))]
    assert not [what for what in code if is_local(what)]
    stores = [i for i, what in enumerate(code) if re.search(r"\bST\.E\.128|\bSTG\.E\.128", what)]
    fences = [i for i, what in enumerate(code) if "MEMBAR" in what and ".SYS" in what]
    assert stores and fences and any(i > min(stores) for i in fences)
    assert [what for what in code if re.search(r"\bLDG?\.E\.64\S*\.STRONG\.SYS", what)]
