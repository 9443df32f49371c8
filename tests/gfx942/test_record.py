"""The record of many seeds is one in which nothing went wrong, of as many as it promises."""

import copy
import json

from tests.gfx942.record import RECORD, failures
from tests.lib.gfx942.litmus import LITMUS
from tests.lib.gfx942.requests import ASKED
from tests.lib.gfx942.triton_cases import CASES


def test_the_record_is_whole():
    record = json.loads(RECORD.read_text())
    assert failures(record) == []
    assert {(row["case"], row["request"]) for row in record["requests"]} == {
        (c, a) for c in CASES for a in ASKED
    }
    assert {row["kernel"] for row in record["litmus"]} == set(LITMUS)
    assert all(row["seeds"] >= 16 for row in record["requests"])
    assert all(row["seeds"] >= 1000 for row in record["litmus"])
    assert all(len(row["object"]) == 64 for part in ("requests", "litmus") for row in record[part])


def test_a_wrong_seed_and_a_mutant_without_a_reason_are_failures():
    record = copy.deepcopy(json.loads(RECORD.read_text()))
    record["requests"][0]["wrong"] = [3]
    record["litmus"][0]["survive"] = {"no barrier before S_NOP": ""}
    assert len(failures(record)) == 2
