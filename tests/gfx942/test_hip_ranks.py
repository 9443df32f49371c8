"""The HIP kernel on two simulated GPUs, in both memories: whole requests, tokens equal to the reference's."""

import pytest
import torch

from kog_triton.backends.cuda.layout.header import render
from kog_triton.backends.cuda.layout.names import STEPS
from kog_triton.backends.hip.layout import lay_out_hip
from kog_triton.backends.request_words import encode_logits
from kog_triton.schedule.hip import lower_hip
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.gfx942 import hip_column_requests
from tests.lib.gfx942.gates import gates_of
from tests.lib.gfx942.hip_kernel import INCLUDES, KERNEL, compiled
from tests.lib.gfx942.hip_ranks import NAMES, SPECS, walk
from tests.lib.gfx942.hip_requests import CONDITIONS, FINISHED, generate, wrong
from tests.lib.gfx942.requests import ASKED, reference_tokens
from tests.lib.real_shapes import real_shape
from tests.lib.slow import some_always

LIMIT_NS = 4_000_000  # of the executor's clock: 400,000 instructions
RUNS = some_always(
    [(case, name) for case, names in NAMES.items() for name in names], ("llama", "greedy"), ("laneformer", "sampled")
)


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize(("case", "name"), RUNS)
def test_requests_equal_the_reference(case, name, conditions):
    one = walk(case)
    assert generate(one, name, conditions) == (reference_tokens(SPECS[case], ASKED[name]), FINISHED)
    assert all(int(m.mailbox[2]) == FINISHED for m in one.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 18))
@pytest.mark.parametrize(("case", "name"), [("llama", "greedy"), ("laneformer", "sampled")])
def test_requests_equal_the_reference_whatever_the_order(case, name, seed):
    for conditions in CONDITIONS.values():
        made = generate(walk(case), name, conditions, seed)
        assert made == (reference_tokens(SPECS[case], ASKED[name]), FINISHED)


@pytest.mark.parametrize("columns", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_words_that_stay_on_their_gpu_are_seen(tmp_path, columns):
    """Of agent scope they reach the GPU's own blocks alone."""
    text, old = (INCLUDES[0] / "kog/ptx.h").read_text(), "constexpr int kWordScope = kSystem;"
    assert text.count(old) == 1
    (tmp_path / "kog").mkdir()
    (tmp_path / "kog/ptx.h").write_text(text.replace(old, "constexpr int kWordScope = kAgent;"))
    includes, hard = (tmp_path, *INCLUDES), CONDITIONS["adversarial"]
    if columns:
        said = hip_column_requests.wrong("llama on two GPUs", hard, includes=includes)
    else:
        tokens = reference_tokens(SPECS["llama"], ASKED["greedy"])
        said = wrong(walk("llama", includes), "greedy", tokens, hard, 1)
    assert "scope" in said


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize("absent", [0, 1])
def test_waits_for_a_rank_that_never_comes_expire(monkeypatch, conditions, absent):
    """The other's record says for what it waited first, and the absent one is told that it need not wait either."""
    one = walk("llama")
    monkeypatch.setattr(one, "absent", (absent,))
    monkeypatch.setattr(one, "conditions", {"steps": 4_000_000} | conditions)
    for seed in range(4):
        for memory in one.ranks:
            memory.words.zero_()
            memory.error.zero_()
        one.run(encode_logits(1), [3], seed, LIMIT_NS, torch.zeros(1, 50))
        told, other = (one.ranks[r].error.tolist() for r in (1 - absent, absent))
        flag, _, step, layer, _, seen, wanted, reported, _ = told
        assert (flag, STEPS[step], layer, seen, wanted) == (1, "attention_out", 0, 0, 1) and reported
        assert other == [0] * 8 + [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama-3.2-1b", 2), ("llama-3.2-1b", 8), ("llama-3.1-8b", 8), ("laneformer-2b", 2), ("laneformer-2b", 8)],
)  # fmt: skip
def test_objects_of_full_size_spill_nothing(name, ranks):
    lowering = lower_hip(build(real_shape(name), ranks), GPUS["mi300x"])
    layout = lay_out_hip(lowering, 4096)
    one = gates_of(compiled(render(layout)), KERNEL, layout.shared_bytes, layout.threads // 64)
    assert (one.spilled, one.scratch) == (0, 0)
    assert one.vgprs <= 256 and one.groups_per_cu >= 1
