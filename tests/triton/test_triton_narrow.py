"""Narrow weights in the Triton kernel, interpreted, against the reference on what they stand for."""

import os
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles for the GPU here: run on a machine without one", allow_module_level=True)

from kog_triton.backends import BackendOptions
from kog_triton.backends.mailbox import Mailbox, Request
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.triton.kernel import codes
from kog_triton.schedule.triton_codes import TileCodes
from kog_triton.stage_check import stage_inputs
from tests.lib.concurrent_interpreter import Deadlock
from tests.lib.narrow_stages import STAGES, error_of
from tests.lib.planting import plant
from tests.lib.prefill_cases import STORED_TOLERANCE
from tests.lib.slow import some_always
from tests.lib.triton_cases import GREEDY, InterpretedBackend
from tests.lib.triton_narrow import CASES, assert_near, weights_of

# Judged by the slow tests: others have the same code with other numbers.
RARE = {"fp8 blocks", "fp8 channels", "int8 channels", "int8 channels, lines and tiles", "int4 g32"}
RARE |= {"fp8 blocks, odd sizes"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in RARE else c for c in CASES])
def test_stages_compute_what_the_unpacked_values_say(case):
    weights = weights_of(case)
    ours = InterpretedBackend(weights, BackendOptions())
    reference = ReferenceBackend(weights, BackendOptions())
    for stage in STAGES:
        assert_near(ours, reference, stage)


# Tiles of a head like qkv_proj's are asked for as if they were those, else when the head begins.
@pytest.mark.parametrize(
    ("case", "alike"),
    [("int4 g32, minimums, head", True), ("int4 g32, then int8 and head", False), ("fp8 channels", False)],
)
def test_tokens_one_after_the_other_have_the_reference_s_logits(case, alike):
    weights = weights_of(case)
    ours = InterpretedBackend(weights, BackendOptions(max_context=32))
    assert ours.tiles.head_alike == alike
    reference = ReferenceBackend(weights, BackendOptions())
    got, want = (torch.from_numpy(b.forward_logits((3, 9, 2, 9))) for b in (ours, reference))
    error = error_of(got, want)
    # The cache and the embedding are bfloat16, and of two keys alike either may weigh more: with roundings put into it
    # the reference is off by up to 8e-3.
    assert error < 2e-2, error


def test_queries_and_attention_s_outputs_are_fine_pairs_for_a_stage_alone_too():
    weights = weights_of("int4 g32")
    ours = InterpretedBackend(weights, BackendOptions())
    reference = ReferenceBackend(weights, BackendOptions())
    state = stage_inputs(ours.spec, "attention", 0, 2, 0)
    got, want = (b.run_stage("attention", 0, state)["attention"] for b in (ours, reference))
    assert error_of(got.cpu().float(), want) < 4e-3  # keys and values are bfloat16


SHARED = {  # of one format each, and of the layouts that differ: zero points, groups within a thread's run, odd sizes
    "int4 g32": 2,
    "fp8 blocks, float16": 3,
    "int8 g64, zero points": 2,
    "int8 channels, lines and tiles": 2,
    "int4 g128, zero points": 2,
    "fp8 blocks, odd sizes": 2,
    "mxfp4": 2,
    "int4 g32, minimums, head": 2,
    "fp8 blocks and head": 2,
    "16 bits, then mxfp4 and head": 2,
}


def served(weights, requests, slots, **options):
    """Tokens of each, the pointers, and of every launch whether in chunks and the columns."""
    options = BackendOptions(num_slots=slots, max_context=32, **options)
    backend, mailbox, columns = InterpretedBackend(weights, options), Mailbox(), []
    run = backend.launcher.run

    def watched(rules, chunks, count):
        columns.append((chunks, count))
        return run(rules, chunks, count)

    backend.launcher.run = watched
    for request in requests:
        mailbox.post(request)
    backend.generate(mailbox)
    made = [[s.token for s in mailbox.read(r.slot, 0) if s.token >= 0] for r in requests]
    return made, backend.memory.pointers, columns


def is_alike(case):
    """Whether requests that share steps have the tokens, keys, values and logits that each has alone.

    As many tokens of each behind prompts of one length, so that all end in one step, whose logits are compared.
    """
    weights, count = weights_of(case), SHARED[case]
    requests = [Request(s, (3 + s, 42 - s), GREEDY, seed=0, max_tokens=3) for s in range(count)]
    made, together, columns = served(weights, requests, count)
    assert columns == [(False, 2 if count == 2 else 4)]
    for slot, one in enumerate(requests):
        want, alone, _ = served(weights, [replace(one, slot=0)], 1)
        cache, logits = together.kv[slot, ..., :4, :], together.logits[slot]
        alike = torch.equal(cache, alone.kv[0, ..., :4, :]) and torch.equal(logits, alone.logits[0])
        if [made[slot]] != want or len(made[slot]) != 3 or not alike:
            return False
    return True


@pytest.mark.parametrize("case", some_always(SHARED, "int4 g32"))
def test_a_request_that_shares_its_steps_has_the_bits_that_it_has_alone(case):
    assert is_alike(case)


SHARED_FAULTS = {
    "columns share what is prepared": ("shared_step", "p.words + task // TILES * S", "p.words + 0 * S"),
    "nobody waits for what is prepared": (
        "shared_step",
        "        _, alive = gather(number + BEFORE, 0, layer, alive, p, S)\n",
        "",
    ),
    "all columns meet the first one's operands": ("matvec", "xs += column * S.total_words", "xs += column * 0"),
}


@pytest.mark.parametrize(
    "fault", some_always(SHARED_FAULTS, "columns share what is prepared", "nobody waits for what is prepared")
)
def test_a_planted_fault_of_shared_steps_is_seen(fault, monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, *SHARED_FAULTS[fault])
    try:
        assert not is_alike("int4 g32")
    except InterpreterError as error:  # what a program raises
        assert Deadlock.__name__ in repr(error)


PROMPT = tuple(range(5, 19))
CHUNKED = (
    "int4 g32",
    "fp8 blocks, float16",
    "int8 g64, zero points",
    "int4 g128, zero points",
    "fp8 blocks, odd sizes",
    "int8 channels, lines and tiles",
    "mxfp4",
    "int4 g32, minimums",
)


def error_of_chunks(case):
    """Of keys and values that a prompt in chunks leaves, off the reference's: the worst layer's, over what is allowed.

    What the second layer reads has been through all matrices of the first.
    """
    weights = weights_of(case, num_layers=2)
    reference = ReferenceBackend(weights, BackendOptions())
    reference.forward(0, list(PROMPT[:-1]), 0, last_only=True)
    count = len(PROMPT) - 1
    homes = [home[..., :count, :].permute(1, 2, 0, 3, 4) for home in reference.kv._data[0]]
    want = torch.stack(homes).float()
    _, pointers, columns = served(weights, [Request(0, PROMPT, GREEDY, 0, 1)], 1, prefill="kernel")
    assert columns == [(True, 1)]
    got = pointers.kv[0, ..., :count, :].float()
    error = (got - want).square().mean((1, 2, 4, 5)) / want.square().mean((1, 2, 4, 5))
    return float(error.sqrt().max()) / STORED_TOLERANCE[weights.spec.dtype]


@pytest.mark.parametrize("case", some_always(CHUNKED, *CHUNKED[:3]))
def test_a_prompt_in_chunks_leaves_the_keys_of_what_the_codes_stand_for(case):
    assert error_of_chunks(case) < 1


CHUNK_FAULTS = {
    "a line's words are a run of K": (
        "columns",
        "word = (i // 4 % SHAPE[0] * SHAPE[1] + thread) * 4 + i % 4",
        "word = (thread * SHAPE[0] + i // 4 % SHAPE[0]) * 4 + i % 4",
        "int8 channels, lines and tiles",
    ),
    "one scale for all groups": ("columns", "+ tl.arange(0, step_groups(S, STAGE))", "* 0", "int4 g32"),
    "codes without their scales": (
        "columns",
        "        values *= load_floats(base + at[1], owned)\n",
        "",
        "int8 g64, zero points",
    ),
    "zero points are scales": ("columns", "base + at[2]", "base + at[1]", "int8 g64, zero points"),
    "the tile before": ("columns", "tile += k // WIDTH * VALUES[2]", "tile += 0", "int8 channels, lines and tiles"),
}


@pytest.mark.parametrize("fault", some_always(CHUNK_FAULTS, *list(CHUNK_FAULTS)[1:3]))
def test_a_planted_fault_of_chunks_is_seen(fault, monkeypatch, tmp_path):
    *where, case = CHUNK_FAULTS[fault]
    plant(monkeypatch, tmp_path, *where)
    assert not error_of_chunks(case) < 1


@triton.jit
def even_codes(w, HALF: tl.constexpr, S: tl.constexpr, T: tl.constexpr):
    return (w << 4) & -0x0F0F0F10


FAULTS = {
    "codes as large as their bytes": (TileCodes, "lift", 1),
    "the odd codes of a word as the even ones": (codes, "codes_in", even_codes),
    "operands of half a byte more": (codes, "ROUNDER", tl.constexpr(1.5 * 2**23)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    weights = weights_of("int4 g32")
    ours = InterpretedBackend(weights, BackendOptions())
    reference = ReferenceBackend(weights, BackendOptions())
    monkeypatch.setattr(*FAULTS[fault])
    with pytest.raises(AssertionError):
        assert_near(ours, reference, "o_proj")
