"""The record of many seeds is one in which nothing went wrong, of as many as it promises and of today's objects."""

import copy
from itertools import product

import pytest

from kog_triton.json_file import in_lines
from tests.gfx942 import mutant_record
from tests.gfx942.hip_budget import KEPT, kept
from tests.gfx942.record import PARTS, RECORD, asked, failures, shared
from tests.lib import kept_rows
from tests.lib.gfx942 import hip_lives, hip_ranks, hip_requests
from tests.lib.gfx942.argued import OF_CASE
from tests.lib.gfx942.backends import COMPILERS, HERE
from tests.lib.gfx942.hip_collectives import POLICY
from tests.lib.gfx942.hip_collectives import compiled as collectives
from tests.lib.gfx942.hip_column_requests import columns
from tests.lib.gfx942.hip_mutants import REQUESTS, walk
from tests.lib.gfx942.litmus import LITMUS, MAPS, QUANTA, map_of, memory_of, plain_of
from tests.lib.gfx942.scopes import accesses_of, counted
from tests.lib.gfx942.triton_cases import FULL_OBJECTS, compiled
from tests.lib.kccl_runs import COLLECTIVES
from tests.lib.slow import some_always


def record():
    return kept_rows.read(RECORD)


def test_nothing_went_wrong_in_the_record():
    kept = record()
    assert failures(kept) == []
    rows = [row for part in PARTS[:5] for row in kept[part]]
    assert all(row["seeds"] >= 16 for row in rows)
    assert all(row["wrong in plain memory"] == [] for part in PARTS[1:5] for row in kept[part])
    assert all(row["seeds"] >= 1000 for row in kept["litmus"])
    assert all(len(row["object"]) == 16 for part in PARTS[1:] for row in kept[part])
    assert [(row["case"], row["variant"]) for row in kept["accesses"]] == FULL_OBJECTS
    assert all(row["accesses"]["words: LOAD sc0 sc1"] for row in kept["accesses"])


def test_sixteen_seeds_meet_every_map_with_every_quantum_in_both_memories():
    for memory in (memory_of, plain_of):
        assert len({(map_of(seed), memory(seed).quantum) for seed in range(16)}) == len(MAPS) * len(QUANTA) == 16
    assert memory_of(0).adversarial and not plain_of(0).adversarial


def test_the_records_lie_in_the_tree_as_they_are_written():
    """A row a line."""
    assert kept_rows.text_of(RECORD) == kept_rows.lines(record())
    assert KEPT.read_text() == in_lines(kept(), 3) + "\n"
    assert kept_rows.text_of(mutant_record.KEPT) == kept_rows.lines(mutants())


def mutants():
    return kept_rows.read(mutant_record.KEPT)


def test_every_mutant_was_caught_or_lives_for_a_reason():
    assert mutant_record.failures(mutants()) == []
    assert [row["case"] for row in mutants()] == list(REQUESTS)
    assert all(row["caught"] > 0.85 * row["can differ"] for row in mutants())


@pytest.mark.parametrize(
    "change",
    [
        {"wrong": ["no barrier in choose"]},
        {"caught": 1},
        {"runs": 7},
        {"elsewhere": {"no barrier in choose": "wide: 0123456789abcdef"}},
    ],
    ids=str,
)
def test_a_mutant_that_lives_or_was_not_tried_is_a_failure(change):
    first, *others = mutants()
    assert mutant_record.failures([first | change, *others])


def test_what_a_case_alone_argues_about_lives_there():
    for row in mutants():
        lives = row["lives"]["argued"]
        for where in OF_CASE[row["case"]]:
            assert any(one.partition(" #")[0] == where or one == where for one in lives), (row["case"], where)


@pytest.mark.parametrize("case", some_always(list(REQUESTS), "split"))
def test_mutants_are_of_todays_objects(case):
    """Else all of the case are to be tried again: `python -m tests.lib.gfx942.hip_mutants`, then mutant_record."""
    (row,) = (one for one in mutants() if one["case"] == case)
    assert row["object"] == walk(case).kernel.code_object.sha256


def stale(kept):
    """What the record says of another object than today's, of those that are quickly compiled."""
    today = {name: make("litmus.hip").sha256 for name, make in HERE.items()}
    hip = {case: one.kernel.code_object.sha256 for case, _, one, _ in hip_requests.asked()}
    wrong = {f"hip {row['case']}" for row in kept["hip"] if row["object"] != hip[row["case"]]}
    of_ranks = {case: hip_ranks.walk(case).kernel.code_object.sha256 for case in hip_ranks.NAMES}
    wrong |= {f"ranks {row['case']}" for row in kept["ranks"] if row["object"] != of_ranks[row["case"]]}
    of_two = kept["columns"][0]
    if of_two["object"] != columns(of_two["case"]).kernel.code_object.sha256:
        wrong.add(f"columns {of_two['case']}")
    wrong |= {
        row["case"]
        for row in kept["requests"]
        if row["request"] == "greedy" and row["object"] != compiled(row["case"]).code_object.sha256
    }
    return wrong | {
        row["compiler"] for row in kept["litmus"] if row["object"] != today.get(row["compiler"], row["object"])
    }


def of_today(kept):
    """A copy of the record that names today's objects, of those that are quickly compiled."""
    kept, today = (copy.deepcopy(kept), {name: make("litmus.hip").sha256 for name, make in HERE.items()})
    for row in kept["requests"]:
        if row["request"] == "greedy":
            row["object"] = compiled(row["case"]).code_object.sha256
    for row in kept["litmus"]:
        row["object"] = today.get(row["compiler"], row["object"])
    hip = {case: one.kernel.code_object.sha256 for case, _, one, _ in hip_requests.asked()}
    for row in kept["hip"]:
        row["object"] = hip[row["case"]]
    for row in kept["ranks"]:
        row["object"] = hip_ranks.walk(row["case"]).kernel.code_object.sha256
    kept["columns"][0]["object"] = columns(kept["columns"][0]["case"]).kernel.code_object.sha256
    return kept


def test_the_record_is_of_todays_kernel():
    """Else `python -m tests.gfx942.record` is to be run again, and its record committed."""
    assert stale(record()) == set()


def test_a_record_of_another_kernel_is_seen():
    kept = of_today(record())
    assert stale(kept) == set()
    for part in ("requests", "litmus", "hip", "columns", "ranks"):
        kept[part][0]["object"] = "0" * 16
    named = {f"{part} {kept[part][0]['case']}" for part in ("hip", "columns", "ranks")}
    assert stale(kept) == {kept["requests"][0]["case"], kept["litmus"][0]["compiler"]} | named


@pytest.mark.slow
def test_the_record_is_whole_and_of_todays_objects():
    """Else `python -m tests.gfx942.record` is to be run again, and its record committed."""
    objects = {(row["case"], row["request"]): row["object"] for row in record()["requests"]}
    for case, name, variant, _ in asked():
        assert objects[case, name] == compiled(case, variant).code_object.sha256, (case, name)
    for row in record()["accesses"]:
        made = compiled(row["case"], row["variant"]).code_object
        assert row["object"] == made.sha256, (row["case"], row["variant"])
        assert row["accesses"] == counted(accesses_of(made)), (row["case"], row["variant"])
    asked_of_hip = [(case, name) for case, name, _, _ in hip_requests.asked()]
    asked_of_hip += [(hip_lives.CASE, name) for name in hip_lives.LIVES]
    assert [(row["case"], row["request"]) for row in record()["hip"]] == asked_of_hip
    asked_of_ranks = [(case, name) for case, name, _ in hip_ranks.asked()]
    assert [(row["case"], row["request"]) for row in record()["ranks"]] == asked_of_ranks
    objects = {row["case"]: row["object"] for row in record()["columns"]}
    assert list(objects) == [case for case, _, _ in shared()]
    for case, one, _ in shared():
        assert objects[case] == one().kernel.code_object.sha256, case
    objects = {row["compiler"]: row["object"] for row in record()["litmus"]}
    rows = {(row["compiler"], row["kernel"]) for row in record()["litmus"]}
    assert rows == {(compiler, name) for compiler in COMPILERS for name in LITMUS}
    assert [(row["case"], row["kernel"]) for row in record()["kccl"]] == list(product(POLICY, COLLECTIVES))
    for row in record()["kccl"]:
        assert row["object"] == collectives(row["case"], 2).sha256
        assert row["mutants"] == row["caught"] + len(row["survive"])
    for compiler, compile_source in COMPILERS.items():
        assert objects[compiler] == compile_source("litmus.hip").sha256, compiler


def test_a_wrong_seed_and_a_mutant_without_a_reason_are_failures():
    kept = copy.deepcopy(record())
    for part in PARTS:
        kept[part][0]["wrong"] = [3]
    kept["litmus"][0]["wrong in plain memory"] = [4]
    kept["litmus"][0]["survive"] = {"no barrier before S_NOP": ""}
    assert len(failures(kept)) == len(PARTS) + 2
