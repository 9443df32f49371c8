"""The HIP kernel's budget a stage: what the committed count says suffices, and it is of today's object."""

import copy

import pytest

from tests.gfx942 import hip_budget
from tests.gfx942.hip_budget import (
    COVER,
    COVER_LEFT,
    DEEP,
    exceeded,
    kept,
    matrices,
    needed,
    share_of_slots,
    share_of_walk,
)
from tests.lib.gfx942.full_width import object_of

STAGES = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]


@pytest.mark.parametrize("name", kept())
def test_every_stage_has_enough_in_flight_and_slots_to_spare(name, capsys):
    row = kept()[name]
    assert sorted(matrices(row)) == sorted(STAGES)
    assert row["spilled"] == 0 and row["layers"] < row["of"]
    assert all(row["stages"][stage]["left"] for stage in ("attention", "o_proj", "down_proj"))
    first, deep = row["depths"]
    assert (first["position"], deep["position"]) == (0, DEEP)
    assert deep["cache"] > 1000 * first["cache"]
    assert share_of_walk(row, deep) > 0.2 and first["layer"] < deep["layer"]
    assert [*exceeded(row)] == []
    assert hip_budget.main([name, "--kept"]) == 0
    said = capsys.readouterr().out
    assert "Nothing of this was measured on AMD hardware." in said and "  gate_up_proj" in said


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "1b" not in n else n for n in kept()])
def test_the_count_is_of_todays_object(name):
    """Else `python -m tests.gfx942.hip_budget --keep` is to be run again, and what it writes committed."""
    assert kept()[name]["object"] == object_of(name).sha256


def test_too_little_is_seen():
    row = copy.deepcopy(kept()["llama-3.2-1b"])
    row["stages"]["o_proj"]["flying"] = int(COVER * needed(row)) - 1
    assert any(one.startswith("o_proj: 49,217 bytes") for one in exceeded(row))
    row = copy.deepcopy(kept()["llama-3.2-1b"])
    row["stages"]["gate_up_proj"]["slots"] *= 4
    assert share_of_slots(row, "gate_up_proj") > 0.6
    assert any(one.startswith("gate_up_proj: ") for one in exceeded(row))
    row["stages"]["o_proj"]["left"] = int(COVER_LEFT * needed(row)) - 1
    assert any(one.startswith("o_proj: 39,374 bytes left") for one in exceeded(row))
    row = copy.deepcopy(kept()["llama-3.2-1b"])
    for depth in row["depths"]:
        depth["walk"], depth["layer"] = 2 * depth["walk"], 3 * depth["layer"]
    assert [one.partition(":")[0] for one in exceeded(row)] == [
        "a layer behind 0 tokens",
        "the walk of keys and values behind 4,000 tokens",
        "a layer behind 4,000 tokens",
    ]
