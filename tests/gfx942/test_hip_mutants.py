"""Mutants of the HIP kernel's machine code: one of each kind is caught here; `python -m tests.lib.gfx942.hip_mutants`
tries all that any request executes. What none executes is named."""

import json
import uuid
from collections import Counter

import numpy as np
import pytest

from tests.lib.compiled import from_own_end, made_in_run
from tests.lib.gfx942.argued import ARGUED, JOIN, JOINED, OF_CASE, OF_COLUMNS, OF_ONE, SUMS_BEHIND
from tests.lib.gfx942.hip_kernel import KERNEL
from tests.lib.gfx942.hip_mutants import (
    WALK,
    Record,
    caught,
    explained,
    idle,
    kept,
    main,
    needed,
    numbered,
    place,
    tried,
    unreached,
    walk,
)
from tests.lib.gfx942.places import chains
from tests.lib.slow import some_always

MERGE = "run_layer > attend > attention > walk_head > merge_head > sync_consumers"
# What changed, and two functions that the instruction stands in: the first such mutant is to be caught.
KINDS = [
    ("of a narrower scope", "append", "store_cache"),  # a row of the cache
    ("of a narrower scope", "qkv_rows", "store_relaxed"),  # a word
    ("of a narrower scope", "join_attention_out", "poll_until"),  # its reader
    ("of a narrower scope", "find_place", "store_relaxed"),  # where a workgroup lies
    ("no wait for vmcnt", "run_batch", "multiply"),  # weights
    ("no wait for lgkmcnt", "run_batch", "sum_of_parts"),  # partial sums
    ("no barrier", "run_batch", "sync_consumers"),
]  # fmt: skip
# Barriers that "split" ran without: there a block's ids are of one warp.
WIDE_BARRIERS = [
    "choose > sync_consumers",  # raw logits: their rows' owners are other threads than read them
    "choose > edit_logits > count_token > sync_consumers",
    "choose > edit_logits > sync_consumers",  # four: counts, edits, biases, bans
    "choose > publish_best > sum_over_block > sync_consumers",
    "choose > publish_candidate > sync_consumers",
]
# What "split" ran without: there what waves without ids keep never changes, and one wave looks at all blocks.
OTHERS = [
    ("wide", "no wait for lgkmcnt in run_head > choose > publish_candidate > sync_consumers"),
    ("wide", "a wait for lgkmcnt but one in run_head > choose > publish_candidate > sync_consumers"),
    ("wide", "no wait for lgkmcnt in run_head > choose > publish_top_p_check > sync_consumers"),
    ("wide", "a wait for lgkmcnt but one in run_head > choose > publish_top_p_check > sync_consumers"),
    ("columns of waves", f"no wait for lgkmcnt in {MERGE}"),
    ("columns of waves", f"no barrier in {MERGE}"),
    ("many", "no wait for lgkmcnt in find_place > sync_consumers"),
    ("many", "a wait for lgkmcnt but one in find_place > sync_consumers"),
    ("many", "no barrier in find_place > sync_consumers"),
    ("many", "no barrier in run_head > choose > check_argmax > gather_shares > sync_consumers"),
]  # fmt: skip
# Words of two GPUs: who stores them into the other's memory, and who waits for them there.
RANK_KINDS = [
    ("of a narrower scope", "push", "store_relaxed"),
    ("of a narrower scope", "join_attention_out", "poll_until"),
]
# Instructions that no request executes, by the functions that they stand in: at most so many. Waits that expire run in
# test_hip_ranks.py; others are rare branches of what the requests do run.
UNREACHED = {
    "give_up": 1030, "tell_best": 240, "attention": 220, "find_peaks": 170, "cut_depth": 170, "edit_logits": 120,
    "outcome_of": 110, "block_of": 90, "publish_best": 90, "draw": 60, "check_argmax": 50, "gather_candidates": 20,
    "stage_attention": 20, "join_mlp_out": 30, "find_place": 20, "end_step": 20, "head_rows": 10, "publish_ahead": 5,
    "join_attention_out": 3, "down_proj": 3, "": 6,
}  # fmt: skip


def of_kind(what: str, *functions: str, case: str = "split"):
    places = chains(walk(case).kernel.code_object, KERNEL)
    for mutant in tried(case):
        names = [name.partition("<")[0] for name in places[mutant.index]]
        there = mutant.what.endswith(what) and all(function in names for function in functions)
        if there and not idle(case, mutant):
            yield mutant


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: " in ".join((kind[0], kind[1])))
def test_a_mutant_of_each_kind_is_caught(kind):
    mutant = next(of_kind(*kind))
    assert caught("split", mutant, 24), mutant.named()


@pytest.mark.parametrize("where", WIDE_BARRIERS)
def test_a_barrier_between_warps_that_share_a_blocks_ids_is_missed(where):
    found = [m for m in tried("wide") if place("wide", m) == f"no barrier in run_head > {where}"]
    assert len(found) == {"choose > edit_logits > sync_consumers": 4, "choose > sync_consumers": 2}.get(where, 1)
    for mutant in found:
        assert caught("wide", mutant, 12), mutant.at


@pytest.mark.parametrize(("case", "where"), some_always(OTHERS, "wide"))
def test_what_a_request_lives_without_another_model_misses(case, where):
    found = [m for m in tried(case) if place(case, m) == where]
    assert any("a race for byte" in caught(case, mutant, 8) for mutant in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "where"), [("heads", JOINED), ("columns of heads", f"{JOIN} > join_many > sync_consumers")]
)
def test_each_barrier_of_a_join_of_more_splits_than_a_warp_s_is_missed(case, where):
    found = [m for m in tried(case) if place(case, m) == f"no barrier in {where}"]
    assert len(found) == 2
    for mutant in found:
        assert "a race for byte" in caught(case, mutant, 8)


def test_the_barrier_between_a_cut_and_log_probabilities_is_missed():
    where = "no barrier in run_head > choose > publish_best > sync_consumers"
    first = next(m for m in tried("split") if place("split", m) == where)
    assert caught("split", first, 14)


@pytest.mark.slow
def test_every_loss_of_what_keeps_rows_new_is_seen():
    """A stale row is one that another block has appended beside those that this one has read."""
    found = [m for m in tried("split") if m.what == "no buffer_inv"]
    assert len(found) == 3  # behind a prompt's step, a token's, and one that is chosen by all blocks
    for mutant in found:
        assert caught("split", mutant, 24), mutant.named()


def test_a_pair_whose_first_word_may_land_first_is_seen():
    where = "store_system_pair > drain_stores"
    found = [m for m in tried("split") if place("split", m).endswith(where)]
    assert len(found) == 6 and not any(idle("split", mutant) for mutant in found)
    for mutant in found:
        assert "lands ahead of its second" in caught("split", mutant, 96), mutant.named()


@pytest.mark.parametrize("case", some_always(list(OF_CASE), "wide"))
def test_what_is_argued_about_is_there(case):
    found = {name: mutant for mutant in tried(case) for name in (place(case, mutant), numbered(case, mutant))}
    assert set(ARGUED[case] if case in ("split", "columns") else OF_CASE[case]) <= set(found)
    kernel = walk(case).kernel
    places = chains(kernel.code_object, kernel.name)
    for where, why in ARGUED[case].items():
        # Unfinished at the barrier behind the wait, and nowhere else but where a block without rows has two in a row.
        if why is SUMS_BEHIND and where in found:
            behind = kernel.mnemonics().index("S_BARRIER", found[where].index)
            others = set().union(*kept(found[where]).values()) - {behind}
            assert all(any(n.startswith("run_rows") for n in places[i]) for i in others), where
    if OF_ONE.items() <= ARGUED[case].items() or OF_COLUMNS.items() <= ARGUED[case].items():
        assert walk(case).layout.lowering.num_blocks <= 64


def test_a_wait_that_other_ways_need_is_found_there():
    """Of a wait that is caught the walk says where, too; of one that is argued about nothing is touched."""
    first = next(of_kind("no wait for vmcnt", "run_batch", "multiply"))
    assert explained("split", first).startswith("other ways need it: 0x")
    at_barrier = "no wait for lgkmcnt in find_place > sync_consumers"
    waits = [m for m in tried("wide") if place("wide", m) == at_barrier]
    (argued,) = (m for m in waits if not needed(m))
    assert len(waits) == 3 and list(kept(argued)) == ["find_place"]


@pytest.mark.parametrize("kind", RANK_KINDS, ids=lambda kind: " in ".join((kind[0], kind[1])))
def test_a_mutant_of_several_gpus_is_caught(kind):
    mutant = next(of_kind(*kind, case="ranks"))
    assert caught("ranks", mutant, 8), mutant.named()


def test_code_that_no_request_reaches_is_named():
    found: Counter[str] = Counter()
    for chain in unreached("split"):
        names = [name.partition("<")[0] for name in chain]
        known = (name for name in reversed(names) if name in UNREACHED and name not in WALK)
        found["give_up" if "give_up" in names else next(known, "")] += 1
    assert {name: count for name, count in found.items() if count > UNREACHED.get(name, 0)} == {}


def test_processes_of_a_run_share_what_requests_do(monkeypatch):
    """Each begins at another end, and what one of them has made is made once; without others all is made here."""
    made = []

    def make():
        made.append(np.arange(3))
        return {"some": made[-1]}

    for run, count in ((uuid.uuid4().hex, 1), (uuid.uuid4().hex, 2), (None, 4)):
        with monkeypatch.context() as patch:
            if run is None:
                patch.delenv("PYTEST_XDIST_TESTRUNUID", raising=False)
            else:
                patch.setenv("PYTEST_XDIST_TESTRUNUID", run)
            assert all(made_in_run("some", make)["some"].tolist() == [0, 1, 2] for _ in range(2))
        assert len(made) == count
    for worker, names in (("gw0", ["a", "b"]), ("gw1", ["b", "a"])):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        assert from_own_end(("a", "b")) == names


def test_the_record_of_mutants_is_gone_on_with(tmp_path, capsys):
    path = tmp_path / "found.json"
    words = ["split", "--record", str(path), "--only", "narrower scope in find_place", "--jobs", "1"]
    main([*words, "--seeds", "0"])
    assert "0 tried, 0 survive, 0 left" in capsys.readouterr().out
    main([*words, "--seeds", "24", "--minutes", "0"])  # one, and no more
    assert "1 tried, 0 survive, " in capsys.readouterr().out
    record = Record.open(path, "split")
    (number,) = record.found
    assert record.found[number]["seeds"] == 24 and record.found[number]["caught"]
    assert record.left([int(number)], 99) == []
    record.note(int(number), 3, "")
    assert record.left([int(number)], 3) == [] and record.left([int(number)], 5) == [(int(number), 3)]
    kept = json.loads(path.read_text()) | {"object": "another"}
    path.write_text(json.dumps(kept))
    with pytest.raises(ValueError, match="is of split, object another: not this one"):
        Record.open(path, "split")
