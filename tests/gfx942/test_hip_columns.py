"""The HIP kernel of several columns, its own machine code: whole requests beside each other in the executor, and gates.

Tokens of every column equal the reference's in both memories. What the kernel must not lack is taken away, to see the
requests go wrong.
"""

from pathlib import Path

import pytest

from kog_triton.backends.hip.column_layout import lay_out_columns
from kog_triton.backends.token_words import Outcome
from kog_triton.errors import ModelError
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.lowering import matrix_stages
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.gfx942.executor import Fault, Memory
from tests.lib.gfx942.hip_column_requests import (
    SHARED,
    blocks_of,
    columns,
    expected,
    gpus_of,
    serve,
    spec_of,
    wrong,
    wrong_prompt,
)
from tests.lib.gfx942.hip_columns import layout_of
from tests.lib.gfx942.hip_gates import gates, keeps_its_promises
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.gfx942.hip_requests import CONDITIONS, MOST_STEPS
from tests.lib.gfx942.requests import ASKED
from tests.lib.real_shapes import real_shape
from tests.lib.slow import some_always

# A compilation takes half a minute: the others' with the slow tests.
ALWAYS = some_always(SHARED, "llama", "qwen3", "windows")


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("case", ALWAYS)
def test_requests_that_share_a_step_equal_the_reference(case, conditions):
    assert wrong(case, conditions) == ""
    assert columns(case).launches == 1  # all end with the same step


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 18))
@pytest.mark.parametrize("case", SHARED)
def test_requests_equal_the_reference_whatever_the_order(case, seed):
    for conditions in CONDITIONS.values():
        assert wrong(case, conditions, seed) == ""


def test_the_cuts_of_k_are_those_meant():
    """Products of four rows and of eight, of several column sets, and operands of more steps than are on their way."""
    found = set()
    for case, names in SHARED.items():
        layout = layout_of(spec_of(case), len(names), blocks_of(case), gpus=gpus_of(case))
        for stage in matrix_stages(layout.lowering.schedule):
            rows = layout.lowering.tilings[stage.name].fragment_rows
            found.add((rows, layout.row_words(stage) // 4, layout.lowering.steps(stage) > 12))
    assert {(8, 1, False), (8, 1, True), (8, 2, False), (4, 1, False), (4, 2, False)} <= found


def test_a_request_that_ends_leaves_the_others_to_the_next_launch():
    asked = [ASKED["greedy"].request(0, 3), ASKED["sampled"].request(1)]
    made = columns("llama").serve(asked, steps=MOST_STEPS, **CONDITIONS["adversarial"])
    assert made == [(expected("llama", "greedy")[:3], Outcome.LENGTH), (expected("llama", "sampled"), Outcome.LENGTH)]
    assert columns("llama").launches == 2


def test_columns_without_a_request_do_nothing():
    made = serve("llama", CONDITIONS["plain"], ("sampled",))
    assert made == [(expected("llama", "sampled"), Outcome.LENGTH)]


@pytest.mark.slow
@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_prompt_in_chunks_ends_with_the_references_first_token(conditions, gpus):
    """Four positions a step, of 37."""
    assert wrong_prompt(conditions, gpus=gpus) == ""


# ---- seen red ----

# By a case, conditions and a seed in which it shows: of what blocks tell each other not every order shows the loss.
TOLD = {
    "nobody waits for a split's flag": ("windows", "plain", 1, "  await<false>(b, Step::kAttentionJoin, at, epoch);\n"),
    "a split is told before every wave's words have landed": (
        "windows",
        "adversarial",
        9,
        "  drain_stores();  // each warp its own: a barrier alone does not wait for them on AMD\n",
    ),
}
PLANTED = {
    # A half of what a thread has of K is multiplied twice.
    "the other four values": (
        "mma/products.h",
        "{w.z, w.w}, {columns[2], columns[3]}",
        "{w.x, w.y}, {columns[0], columns[1]}",
    ),
    # Sums of other eights of K, which are of nobody.
    "products of nobody": ("mma/products.h", "which / kRows == 4 * group / kRows", "which / kRows == 0"),
    "low parts are left out": ("mma/products.h", "v[i] += shuffle_xor(v[i], 1);", ""),
    "rows and eights of K of another order": (
        "ring.h",
        "b.in_warp % kRows * (kWarpThreads / kRows) + b.in_warp / kRows",
        "b.in_warp",
    ),
    "the stream goes on where the last step ended": (
        "ring.h",
        "KOG_DEVICE void begin_ring(const Block& b) { save_ring(b, Ring()); }",
        "KOG_DEVICE void begin_ring(const Block&) {}",
    ),
}


def planted(folder: Path, file: str, old: str, new: str) -> tuple[Path, ...]:
    """The include folders, a file of which lacks something."""
    text = next(path.read_text() for one in INCLUDES if (path := one / "kog" / file).exists())
    assert text.count(old) == 1, old
    (folder / "kog" / file).parent.mkdir(parents=True)
    (folder / "kog" / file).write_text(text.replace(old, new))
    return folder, *INCLUDES


@pytest.mark.parametrize("fault", some_always(PLANTED, "products of nobody"))
def test_a_planted_fault_is_seen(fault, tmp_path):
    assert wrong("llama", CONDITIONS["plain"], includes=planted(tmp_path, *PLANTED[fault]))


@pytest.mark.slow
@pytest.mark.parametrize("fault", TOLD)
def test_a_split_that_is_told_wrongly_is_seen(fault, tmp_path):
    case, conditions, seed, old = TOLD[fault]
    includes = planted(tmp_path, "columns/attention.h", old, "")
    assert wrong(case, CONDITIONS[conditions], seed, includes)


@pytest.mark.slow
def test_every_acquire_of_the_caches_rows_is_needed(monkeypatch):
    """Rows pass from one block's split to another's, which has read beside them."""
    one, names = columns("split"), ("long prompt", "long prompt")
    right = [(expected("split", name), Outcome.LENGTH) for name in names]
    acquires = [i for i, name in enumerate(one.kernel.mnemonics()) if name == "BUFFER_INV"]
    assert len(acquires) == 2
    # Lines stay as they were found.
    hard = [{"memory": Memory(True, early, 0), "xcc": lambda group: group // 2} for early in (0.3, 0.9)]
    assert serve("split", hard[0], names) == right
    for acquire in acquires:
        without = one.kernel.copy()
        without.replace([acquire], "S_NOP")
        monkeypatch.setattr(one, "kernel", without)
        assert any(shows(names, right, hard[seed % 2], seed) for seed in range(8)), acquire


def shows(names, right, conditions, seed):
    try:
        return serve("split", conditions, names, seed) != right
    except (Fault, AssertionError):
        return True


# ---- gates ----


@pytest.mark.parametrize("case", some_always(SHARED, "llama", "qwen3"))
def test_the_object_keeps_what_the_design_promises(case):
    keeps_its_promises(columns(case).layout)


@pytest.mark.parametrize(
    ("name", "count", "gpus"),
    [("llama-3.2-1b", 2, 1), *(pytest.param(*more, marks=pytest.mark.slow) for more in
     (("llama-3.2-1b", 4, 1), ("qwen3-0.6b", 8, 1), ("llama-3.1-8b", 2, 1), ("laneformer-2b", 2, 1),
      ("laneformer-2b", 4, 8), ("llama-3.2-1b", 4, 8)))],
)  # fmt: skip
def test_objects_of_full_size_keep_it(name, count, gpus):
    layout = layout_of(real_shape(name), count, max_context=4096, gpus=gpus)
    keeps_its_promises(layout)
    if name == "llama-3.2-1b" and gpus == 1:
        # 1.5 times what 4.2 TB/s and 2 us ask of a block, in straight code (docs/HIP.md).
        one, blocks = gates(layout), layout.lowering.num_blocks
        assert one.most_in_flight * 64 * 16 * one.waves >= 1.5 * 4.2e12 * 2e-6 / blocks


# ---- what fits ----


@pytest.mark.parametrize(
    ("name", "most"),
    [("llama-3.2-1b", 4), ("qwen3-0.6b", 8), ("llama-3.1-8b", 2), ("qwen3-32b", 2), ("laneformer-2b", 4)],
)  # fmt: skip
def test_as_many_share_a_step_as_lds_holds(name, most):
    lowering = lower_hip(build(real_shape(name)), GPUS["mi300x"])
    for chunk in (False, True):
        for count in (2, 4, 8):
            if count <= most:
                layout = lay_out_columns(lowering, 4096, count, chunk)
                assert layout.shared_bytes <= 64 << 10
                continue
            with pytest.raises(ModelError, match=f"activations of {count} requests take .* of LDS"):
                lay_out_columns(lowering, 4096, count, chunk)


def test_a_k_that_outgrows_the_registers_is_refused_by_name():
    lowering = lower_hip(build(real_shape("qwen2.5-7b")), GPUS["mi300x"])
    with pytest.raises(ModelError, match="down_proj's activations of 2 requests take 148 registers"):
        lay_out_columns(lowering, 4096, 2)
