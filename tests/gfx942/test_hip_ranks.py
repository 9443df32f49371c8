"""The HIP kernel on two and four simulated GPUs, in both memories: whole requests, tokens equal to the reference's."""

import functools

import pytest

from kog_triton.model.spec import Head, Reduce
from tests.lib.gfx942.executor import WEAK, Memory
from tests.lib.gfx942.hip_kernel import INCLUDES
from tests.lib.gfx942.hip_ranks import HipRankWalk
from tests.lib.gfx942.hip_requests import FINISHED, generate, wrong
from tests.lib.gfx942.requests import ASKED, reference_tokens
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.triton_cases import lanes, plain

CONDITIONS = {
    "plain": {"memory": Memory(quantum=4000)},
    "adversarial": {"memory": WEAK, "xcc": lambda group: group * 5 % 7},
}
SPECS = {
    "llama": plain(2),
    "laneformer": lanes((Reduce.OWN, Reduce.DELAYED), 1, Head.VOCAB_PARALLEL, lane_norms=True),
}
BLOCKS = 4  # of a GPU
SLOW = pytest.mark.slow
RUNS = [
    ("llama", 2, "greedy"),
    ("laneformer", 2, "sampled"),
    pytest.param("llama", 2, "edits", marks=SLOW),
    pytest.param("llama", 2, "rules", marks=SLOW),
    pytest.param("laneformer", 2, "greedy", marks=SLOW),
    pytest.param("laneformer", 2, "edits", marks=SLOW),
]


@functools.cache
def walk(case: str, ranks: int, includes=INCLUDES) -> HipRankWalk:
    return HipRankWalk(SPECS[case], ArrayWeights(SPECS[case]), ranks, BLOCKS, includes=includes)


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
@pytest.mark.parametrize(("case", "ranks", "name"), RUNS)
def test_requests_equal_the_reference(case, ranks, name, conditions):
    one = walk(case, ranks)
    assert generate(one, name, conditions) == (reference_tokens(SPECS[case], ASKED[name]), FINISHED)
    assert all(int(m.mailbox[2]) == FINISHED for m in one.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 18))
@pytest.mark.parametrize(("case", "ranks", "name"), [(c, r, n) for c, r, n in RUNS[:2]])
def test_requests_equal_the_reference_whatever_the_order(case, ranks, name, seed):
    for conditions in CONDITIONS.values():
        made = generate(walk(case, ranks), name, conditions, seed)
        assert made == (reference_tokens(SPECS[case], ASKED[name]), FINISHED)


def test_words_that_stay_on_their_gpu_are_seen(tmp_path):
    """Of agent scope they reach the GPU's own blocks alone."""
    text, old = (INCLUDES[0] / "kog/ptx.h").read_text(), "constexpr int kWordScope = kSystem;"
    assert text.count(old) == 1
    (tmp_path / "kog").mkdir()
    (tmp_path / "kog/ptx.h").write_text(text.replace(old, "constexpr int kWordScope = kAgent;"))
    one = HipRankWalk(
        SPECS["llama"], ArrayWeights(SPECS["llama"]), 2, BLOCKS, includes=(tmp_path, *INCLUDES)
    )
    tokens = reference_tokens(SPECS["llama"], ASKED["greedy"])
    assert "scope" in wrong(one, "greedy", tokens, CONDITIONS["adversarial"], 1)
