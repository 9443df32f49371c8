"""Machine code of the CUDA kernel of one token: what spills, and what waits for the cache too early."""

import re

import pytest
from cuda_walk import layout_of
from machine_code import SHAPES, in_turn, innermost, is_local, machine_code
from ring_walker import spec_of

from kog_triton.model.shapes import named_shape

MOST_SPILLS = 48  # loads and stores, once a token's included


@pytest.mark.parametrize("name", in_turn([*SHAPES, "qwen2.5-0.5b", "odd"]))
def test_no_loop_that_streams_or_waits_spills(name):
    spec = spec_of(hidden_size=54, num_heads=4, head_dim=8) if name == "odd" else named_shape(name)
    code = machine_code(layout_of(spec, max_context=1024))
    weights = innermost(code, r"\bHMMA")
    polls = innermost(code, r"\bLDG.*STRONG\.GPU")
    walks = [body for body in innermost(code, r"\bHMMA") if any("MUFU.EX2" in w for w in body)]
    assert len(weights) >= 5  # the matrix stages, but o_proj where it is unrolled, and attention
    assert len(polls) >= 8 and len(walks) == 1
    for body in weights + polls + walks:
        assert not [what for what in body if is_local(what)]


def registers(text):
    """Numbers of the registers that are named in an instruction's operands."""
    return {
        int(first) + more
        for first, wide in re.findall(r"(?<![A-Z])R(\d+)((?:\.64)?)", text)
        for more in range(2 if wide else 1)
    }


def used_too_early(code):
    """Loads of the cache ahead of attention's wait, and what reads them before its first poll."""
    begin = min(at for at, what in code if "LDG.E.NA" in what)
    found, held = [], {}
    for _, what in [c for c in code if c[0] >= begin]:
        if "STRONG.GPU" in what:
            return found
        opcode, _, operands = re.sub(r"^@!?U?P\w+ ", "", what).partition(" ")
        target, _, sources = operands.partition(",")
        if "LDG.E.NA" in opcode:
            first = int(re.match(r"\s*R(\d+)", target).group(1))
            width = next((n for w, n in ((".128", 4), (".64", 2)) if w in opcode), 1)
            held |= dict.fromkeys(range(first, first + width), what)
        else:
            found += [(held[r], what) for r in registers(sources) & held.keys()]
    raise AssertionError("no poll behind the loads")


@pytest.mark.parametrize("name", in_turn(["qwen3-0.6b", "llama-3.2-1b", "laneformer-2b"]))
def test_no_wait_for_the_cache_comes_before_the_wait_for_queries(name):
    """A register moved out of a load's way cost 2 us a layer of Qwen3-0.6B on an H200."""
    code = machine_code(layout_of(named_shape(name), max_context=1024))
    assert used_too_early(code) == []


@pytest.mark.parametrize("name", in_turn(SHAPES))
def test_the_walk_hardly_spills(name):
    """Beside the ring little is left of the L1: on an H200, 50 spilled registers cost 15 % of the speed."""
    code = machine_code(layout_of(named_shape(name), max_context=1024))
    assert len([what for _, what in code if is_local(what)]) <= MOST_SPILLS


@pytest.mark.parametrize("name", in_turn(["laneformer-2b", "qwen3-8b"]))
def test_a_stage_alone_has_the_registers_that_it_has_in_the_walk(name):
    """Or it would be other code, and its time nobody's."""
    code = machine_code(layout_of(named_shape(name), max_context=1024), "stage.cu")
    assert len([what for _, what in code if "USETMAXREG" in what]) == 2
    assert len([what for _, what in code if is_local(what)]) <= MOST_SPILLS
