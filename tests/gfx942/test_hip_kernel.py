"""The HIP kernel's own machine code: whole requests in the executor, gates on small objects and one of full size.

Tokens equal the reference's in both memories. What a kernel must not lack is taken away, to see the requests go wrong.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.layout.layout import Layout
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.request_words import MOST_LOGPROBS
from kog_triton.model.spec import DType
from kog_triton.sampling import SamplingParams
from tests.lib.gfx942.executor import Memory
from tests.lib.gfx942.hip_gates import gates, keeps_its_promises
from tests.lib.gfx942.hip_kernel import INCLUDES, UNLIMITED_NS, HipWalk, layout_of
from tests.lib.gfx942.hip_mutants import WIDE, WIDE_PROMPT
from tests.lib.gfx942.hip_requests import (
    CONDITIONS,
    FINISHED,
    MOST_STEPS,
    RUNS,
    STOPPED,
    TAILS_NAMES,
    generate,
    split_tokens,
    split_walk,
    tails_tokens,
    tails_walk,
    walk,
    wrong,
)
from tests.lib.gfx942.places import chains
from tests.lib.gfx942.requests import ASKED, ENDS, TOKENS, Asked, expected, reference_tokens
from tests.lib.gfx942.triton_cases import ALL, CASES
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.slow import some_always
from tests.lib.triton_cases import plain


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize(("case", "name"), RUNS)
def test_requests_equal_the_reference(case, name, conditions):
    assert generate(walk(case), name, conditions) == (expected(case, name), FINISHED)


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
def test_a_context_that_is_split(conditions):
    one = split_walk()
    assert one.layout.splits == 8
    assert generate(one, "long prompt", conditions) == (split_tokens(), FINISHED)


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("name", some_always(TAILS_NAMES, "greedy"))
def test_weights_that_are_asked_for_as_the_stage_before_ends(name, conditions):
    assert generate(tails_walk(), name, conditions) == (tails_tokens(name), FINISHED)


# Blocks have two units of qkv_proj or three, of which the fragments of two are taken ahead.
UNEVEN = plain(1, hidden_size=3072, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16)


def test_no_weight_of_o_proj_comes_ahead_of_qkv_projs():
    """Until 2026-12-01 four did, in the place of others: of Qwen3-14B on two GPUs, too."""
    one, asked = HipWalk(UNEVEN, ArrayWeights(UNEVEN), 6), ASKED["greedy"]
    one.conditions = {"steps": MOST_STEPS} | CONDITIONS["plain"]
    made = one.generate(list(asked.prompt), 3, asked.params)
    assert made == (reference_tokens(UNEVEN, asked)[:3], FINISHED)


def test_each_stage_asks_for_what_follows():
    """So many fragments: for o_proj, gate_up_proj, down_proj and the next layer or the head."""
    kernel, found = tails_walk().kernel, Counter()
    for name, chain in zip(kernel.mnemonics(), chains(kernel.code_object, kernel.name), strict=True):
        names = [one.partition("<")[0] for one in chain]
        if name == "GLOBAL_LOAD_DWORDX4" and "multiply" in names and "take_one" in names:
            found.update(one for one in names if one.endswith("_proj"))
    assert found == {"qkv_proj": 7, "o_proj": 2, "gate_up_proj": 3, "down_proj": 3}


@pytest.mark.parametrize("name", ["edits", "rules"])
def test_blocks_by_xcd_are_the_same_throughout_a_token(name):
    """What chooses the token makes a Block of its own: in the executor's usual order it is the workgroup's index."""
    conditions = CONDITIONS["plain"] | {"xcc": lambda group: group * 5 % 7}
    assert generate(walk("llama"), name, conditions) == (expected("llama", name), FINISHED)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 18))
@pytest.mark.parametrize(("case", "name"), RUNS)
def test_requests_equal_the_reference_whatever_the_order(case, name, seed):
    for conditions in CONDITIONS.values():
        assert generate(walk(case), name, conditions, seed) == (expected(case, name), FINISHED)


@pytest.mark.parametrize("rule", [{"top_k": 20}, {"top_k": 5}, {"top_p": 0.3}], ids=str)
def test_a_cut_among_ids_that_many_threads_hold(rule):
    """Threads that add to one bin after another stay together: until 2026-11-28 a cut was silently another's."""
    one = HipWalk(WIDE, ArrayWeights(WIDE), 8)
    one.conditions = {"steps": MOST_STEPS} | CONDITIONS["adversarial"]
    for seed in (5, 6):
        asked = Asked(SamplingParams(temperature=2.5, seed=seed, **rule), WIDE_PROMPT)
        made = one.generate(list(asked.prompt), TOKENS, asked.params)
        assert made == (reference_tokens(WIDE, asked), FINISHED)


def test_a_stop_id_ends_the_request():
    tokens = expected("llama")
    made, outcome = generate(walk("llama"), "greedy", CONDITIONS["adversarial"], stops=(tokens[ENDS],))
    assert made == tokens[: tokens.index(tokens[ENDS]) + 1]
    assert outcome == STOPPED


@pytest.mark.parametrize("case", CASES)
def test_logits_of_every_position(case):
    """As near to the reference's as 16-bit words between the stages allow."""
    spec, tokens = CASES[case].spec, [3, 42, 12, 7, 9, 30, 1, 2]
    one = walk(case)
    one.conditions = CONDITIONS["plain"]
    logits = one.forward_logits(tokens, limit=UNLIMITED_NS)
    exact = ReferenceBackend(ArrayWeights(spec), BackendOptions()).forward_logits(tokens)
    error = np.sqrt(((logits - exact) ** 2).mean())
    assert error < (0.03 if spec.dtype is DType.BF16 else 0.006)


# ---- seen red ----

LISTS = "kLists = (kAllBlocks + kConsumers - 1) / kConsumers;"
LISTS_OF_TWO = "kLists = kAllBlocks / 2;"

PLANTED = {
    # Rows of the cache stay in one XCD's L2.
    "a cache row is not written through": ("store_scoped<kAgent>(p, v)", "*in_memory(p) = v"),
    # Words travel within an XCD.
    "words of a narrow scope": (
        "constexpr int kWordScope = kAgent",
        "constexpr int kWordScope = __HIP_MEMORY_SCOPE_WORKGROUP",
    ),
    "half of a dot product": (
        "__builtin_bit_cast(Half2, a), __builtin_bit_cast(Half2, b), c",
        "__builtin_bit_cast(Half2, a & 0xffff), __builtin_bit_cast(Half2, b), c",
    ),
}


def planted(fault: str, folder: Path) -> tuple[Path, ...]:
    """The include path of a kernel whose seam has a fault."""
    text, (old, new) = (INCLUDES[0] / "kog/ptx.h").read_text(), PLANTED[fault]
    assert text.count(old) == 1, fault
    (folder / "kog").mkdir()
    (folder / "kog/ptx.h").write_text(text.replace(old, new))
    return (folder, *INCLUDES)


# The others' kind is among the mutants that are always caught, or any request's tokens tell it.
@pytest.mark.parametrize("fault", some_always(PLANTED, "words of a narrow scope"))
def test_a_planted_fault_is_seen(fault, tmp_path):
    one = split_walk(planted(fault, tmp_path))
    steps = MOST_STEPS // 2  # three times what this request takes: what has no end, ends sooner
    hard = CONDITIONS["adversarial"] | {"memory": Memory(adversarial=True, evict=0), "steps": steps}
    assert any(wrong(one, "long prompt", split_tokens(), hard, seed) for seed in range(32))


def test_another_fragment_than_follows_is_seen(tmp_path):
    text, right = (INCLUDES[0] / "kog/matvec.h").read_text(), "tail.take_one(b, ring, layer, i - kFirst);"
    assert text.count(right) == 1
    (tmp_path / "kog").mkdir()
    (tmp_path / "kog/matvec.h").write_text(text.replace(right, "tail.take_one(b, ring, layer, 1 - (i - kFirst));"))
    one = tails_walk((tmp_path, *INCLUDES))
    assert wrong(one, "greedy", tails_tokens("greedy"), CONDITIONS["plain"], 1)


def test_the_best_of_more_blocks_than_registers_hold(tmp_path):
    """As many GPUs have: a thread asks for a block's next best once it has taken one, of four blocks by two threads."""
    text = next(p.read_text() for one in INCLUDES if (p := one / "kog/logprob.h").exists())
    for old, new in (("kMostHeldRanks = 16;", "kMostHeldRanks = 0;"), (LISTS, LISTS_OF_TWO)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / "kog").mkdir()
    (tmp_path / "kog/logprob.h").write_text(text)
    params = SamplingParams(temperature=0.8, seed=3, logprobs=MOST_LOGPROBS)

    def told(one, conditions):
        one.conditions = {"steps": MOST_STEPS} | conditions
        one.memory.logprobs.zero_()
        return one.generate([3, 42, 12], 4, params), one.memory.logprobs.numpy().copy()

    both = [HipWalk(WIDE, ArrayWeights(WIDE), 8, includes=i) for i in (INCLUDES, (tmp_path, *INCLUDES))]
    tokens, right = told(both[0], CONDITIONS["plain"])
    assert np.count_nonzero(right) >= 4 * MOST_LOGPROBS
    for conditions in CONDITIONS.values():
        made, records = told(both[1], conditions)
        assert made == tokens
        assert np.array_equal(records, right)


# ---- gates ----


def layout(case: str) -> Layout:
    one = ALL[case]
    return layout_of(one.spec, one.num_blocks, one.max_context)


@pytest.mark.parametrize("case", [*CASES, "llama-3.2-1b"])
def test_the_object_keeps_what_the_design_promises(case):
    keeps_its_promises(layout(case))


def test_enough_is_in_flight_at_full_size():
    """1.5 times what 4.2 TB/s and 2 us ask of a block, in straight code (docs/HIP.md)."""
    made = layout("llama-3.2-1b")
    one, blocks = gates(made), made.lowering.num_blocks
    assert one.most_in_flight * 64 * 16 * one.waves >= 1.5 * 4.2e12 * 2e-6 / blocks
