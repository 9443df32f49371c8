"""The HIP kernel's budget a stage: what the committed count says suffices, and it is of today's object."""

import copy

import numpy as np
import pytest

from tests.gfx942 import hip_budget
from tests.gfx942.hip_budget import DEEP, exceeded, kept, matrices, share
from tests.lib.gfx942.clang import text_object
from tests.lib.gfx942.executor import Buffer, Kernel, Launch, Memory
from tests.lib.gfx942.full_width import idle, least_left, most_on_way, object_of

STAGES = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"]
# At most: attention's share of the slots of keys and values, what is idle of a first token's time, and of a deep one's.
COUNTED = {"llama-3.2-1b": (1.89, 0.12, 0.17), "laneformer-2b": (1.57, 0.04, 0.1), "llama-3.1-8b": (1.51, 0.032, 0.05)}


@pytest.mark.parametrize("name", kept())
def test_every_stage_has_enough_in_flight_and_slots_to_spare(name, capsys):
    row = kept()[name]
    assert sorted(matrices(row)) == sorted(STAGES)
    assert row["spilled"] == 0 and row["layers"] < row["of"]
    first, deep = row["depths"]
    assert all(len(depth["way"][n]) == 2 for depth in (first, deep) for n in ("attention", "o_proj", "down_proj"))
    assert (first["position"], deep["position"]) == (0, DEEP)
    assert deep["cache"] > 1000 * first["cache"]
    assert share(row, deep["walk"], deep["cache"]) > 0.2 and first["layer"] < deep["layer"]
    assert [*exceeded(row)] == []
    held = share(row, deep["attention"], deep["cache"]), first["idle"], deep["idle"]
    assert all(0.9 * most < one <= most for one, most in zip(held, COUNTED[name], strict=True))
    assert hip_budget.main([name, "--kept"]) == 0
    said = capsys.readouterr().out
    assert "Nothing of this was measured on AMD hardware." in said and "  gate_up_proj" in said


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "1b" not in n else n for n in kept()])
def test_the_count_is_of_todays_object(name):
    """Else `python -m tests.gfx942.hip_budget --keep` is to be run again, and what it writes committed."""
    assert kept()[name]["object"] == object_of(name).sha256


def test_too_little_is_seen():
    row = copy.deepcopy(kept()["llama-3.2-1b"])
    for depth in row["depths"]:
        depth["way"] |= {"attention": [9, 38], "o_proj": [48, 38]}
    assert [one.partition(" KB")[0] for one in exceeded(row)] == [
        "attention behind 0 tokens: 38",
        "o_proj behind 0 tokens: 48",
        "o_proj behind 0 tokens: 38",
        "o_proj behind 4,000 tokens: 48",
        "o_proj behind 4,000 tokens: 38",
    ]
    row = copy.deepcopy(kept()["llama-3.2-1b"])
    row["stages"]["gate_up_proj"]["slots"] *= 4
    assert any(one.startswith("gate_up_proj: ") for one in exceeded(row))
    row = copy.deepcopy(kept()["llama-3.2-1b"])
    for depth in row["depths"]:
        depth["walk"], depth["layer"] = 2 * depth["walk"], 3 * depth["layer"]
    assert [one.partition(":")[0] for one in exceeded(row)] == [
        "a layer behind 0 tokens",
        "the walk of keys and values behind 4,000 tokens",
        "a layer behind 4,000 tokens",
    ]


def test_a_blocks_bytes_are_those_of_its_waves():
    """Wave 0 asks for three loads and waits until one is left, wave 1 for one."""
    load = "global_load_dwordx4 v[8:11], v1, s[4:5]\\n"
    code = f"v_mov_b32 v1, 0\\nv_cmp_lt_u32 vcc, 63, v0\\n{load}s_cbranch_vccnz 1f\\n{load * 2}"
    code += "1: s_waitcnt vmcnt(1)\\ns_barrier\\ns_waitcnt vmcnt(0)"
    text = f"""extern "C" __attribute__((global)) void two(int* p) {{
        asm volatile("{code}" :: "{{s[4:5]}}"(p), "{{v0}}"(__builtin_amdgcn_workitem_id_x()) : "v11"); }}"""
    words = np.zeros(4, np.uint32)
    launch, memory = Launch([words.ctypes.data], (2, 1, 1), (128, 1, 1)), Memory(True, trace=True)
    passed = Kernel(text_object(text, ()), "two").run(launch, [Buffer(words)], memory).passed
    for block in (0, 1):
        waves = [passed[(passed[:, :2] == (block, k)).all(1)][:, 3:].tolist() for k in (0, 1)]
        assert waves == [[[3, 1], [1, 2], [1, 0]], [[1, 2], [1, 0]]]
    first, _, last = sorted({*passed[:, 2].tolist()})
    assert most_on_way(passed, ["first"] * last + ["last"], 2) == {"first": 3, "last": 2}
    assert [least_left(passed[passed[:, 2] == at], 2) for at in (first, last)] == [1, 0]


def test_what_is_asked_for_late_leaves_the_memory_idle():
    """Two waves ask for two loads a layer, or did in the last."""
    for ahead, time in (0, 5 * 3.5), (2, 3.5 + 4 * 2.5):
        rows = [(1, 2, 0), (2, ahead, ahead + 1)] * 2 + [(1, 2, 0), (2, 0, 1)]
        passed = np.array([(block, wave, *row) for row in rows for block in (0, 1) for wave in (1, 0)])
        assert idle(passed, 2, 2.0, 3, 5) == 1 - 10 / time
