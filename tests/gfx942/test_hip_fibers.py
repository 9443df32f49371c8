"""The HIP kernel's own C++ on a CPU, by g++: its threads are fibers, its blocks fibers or CPU threads under a judge.

Another compiler and another machine than the executor's (tests/lib/gfx942): what they agree on, tokens of requests and
results of stages, is the source's own. Of ThreadSanitizer as in tests/cuda/test_cuda_threads.py.
"""

import re

import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.cuda.layout import header
from kog_triton.backends.mailbox import Failure
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.model.small import small_model
from kog_triton.model.spec import Reduce
from kog_triton.request_check import check_requests
from kog_triton.stage_check import check_stages, stage_inputs
from tests.lib.cuda_requests import serve, tokens_of
from tests.lib.cuda_threads import BOUNDED, JUDGED
from tests.lib.gfx942 import hip_column_requests as columns
from tests.lib.gfx942.hip_requests import LENGTHS, NAMES, SPLIT, SPLIT_NAMES, TAILS, TAILS_BLOCKS, split_tokens
from tests.lib.gfx942.requests import ASKED, TOKENS, expected, reference_tokens
from tests.lib.gfx942.triton_cases import CASES
from tests.lib.hip_walk import HipColumnBackend, HipColumnThreadWalk, HipFiberBackend, HipThreadWalk
from tests.lib.lowering_cases import ArrayWeights
from tests.lib.narrow_stages import error_of
from tests.lib.ring_walker import f16_spec
from tests.lib.slow import some_always
from tests.lib.triton_cases import lanes

slow = pytest.mark.slow
UNLIMITED_NS = 1 << 40
JUDGES = {"races": JUDGED, "bounds": BOUNDED}


def opened(kind, spec, num_blocks, num_slots=1, seed=0, **options):
    of = {key: options.pop(key) for key in ("wave", "chunk_positions") if key in options}
    context, gpus = options.pop("context", 64), options.pop("gpus", 1)
    given = BackendOptions(num_slots, context, num_gpus=gpus)
    return type("Opened", (kind,), of)(ArrayWeights(spec), given, num_blocks, seed, **options)


def asked(backend, name):
    (steps,) = serve(backend, ASKED[name].request()).values()
    return tokens_of(steps)


@pytest.mark.parametrize("wave", [64, pytest.param(32, marks=slow)])
@pytest.mark.parametrize("case", ["llama", *(pytest.param(c, marks=slow) for c in NAMES if c != "llama")])
def test_requests_equal_the_reference(case, wave):
    """By waves of two warps, as CDNA's, and of one; single warps are held back."""
    backend = opened(HipFiberBackend, CASES[case].spec, CASES[case].num_blocks, seed=-9, wave=wave)
    for name in NAMES[case]:
        assert asked(backend, name) == expected(case, name)


@slow  # judges below run qwen3's, and compare its tokens, always
@pytest.mark.parametrize("case", columns.SHARED)
def test_requests_that_share_a_step_equal_the_reference(case, monkeypatch):
    if case in columns.LENGTHS:
        shorten(monkeypatch, columns.LENGTHS[case])
    names = columns.SHARED[case]
    count, blocks = max(2, len(names)), columns.blocks_of(case)
    spec, gpus = columns.spec_of(case), columns.gpus_of(case)
    backend = opened(HipColumnBackend, spec, blocks, count, seed=-9, counts=(count,), gpus=gpus)
    made = serve(backend, *(columns.ASKED[name].request(i) for i, name in enumerate(names)))
    for i, name in enumerate(names):
        assert tokens_of(made[i]) == columns.expected(case, name)
    assert sum(each.kernel.launches for each in backend.columns.kernels) > 0


def shorten(monkeypatch, lengths):
    """Contexts are split, and splits joined in a step of their own, from so many positions on."""
    monkeypatch.setattr(header, "split_least", lambda spec: lengths["split_least"])
    monkeypatch.setattr(header, "MERGED_LENGTH", lengths["merged_length"])


@slow
def test_a_context_that_is_split(monkeypatch):
    shorten(monkeypatch, LENGTHS)
    backend = opened(HipFiberBackend, SPLIT, 8, seed=-9)
    for name in SPLIT_NAMES:
        assert asked(backend, name) == split_tokens(name)


@slow
def test_a_prompt_in_chunks():
    backend = opened(HipFiberBackend, CASES["llama"].spec, 8, chunk_positions=4)
    backend.settle()
    assert asked(backend, "long prompt") == expected("llama", "long prompt")
    assert backend.chunks.kernel.kernel.launches > 0


@slow
@pytest.mark.parametrize("case", ["llama", "laneformer"])
def test_two_gpus(case):
    backend = opened(HipFiberBackend, CASES[case].spec, 4, seed=-9, gpus=2)
    for name in ("greedy", "rules", "edits"):
        assert asked(backend, name) == expected(case, name)


@slow
@pytest.mark.parametrize("wave", [64, 32])
@pytest.mark.parametrize("case", CASES)
def test_every_stage_alone(case, wave):
    kind = type("OfWaves", (HipFiberBackend,), {"wave": wave})
    assert check_stages(kind, small_model(CASES[case].spec), "a CPU") == 12


# Stages ask for what follows as they end, of lanes beside sums that come late.
TAILED = {
    "one lane": (TAILS.replace(vocab_size=1024), TAILS_BLOCKS),
    "lanes": (
        lanes(
            (Reduce.OWN, Reduce.DELAYED, Reduce.NOW),
            1,
            hidden_size=256,
            intermediate_size=1024,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=1024,
        ),
        2 * TAILS_BLOCKS,
    ),
}


@pytest.mark.parametrize("case", some_always(TAILED, "one lane"))
def test_weights_that_are_asked_for_as_the_stage_before_ends(case):
    spec, num_blocks = TAILED[case]

    class OfFewBlocks(HipFiberBackend):
        def __init__(self, weights, options):
            super().__init__(weights, options, num_blocks)

    assert check_stages(OfFewBlocks, spec, "a CPU") == {"one lane": 12, "lanes": 18}[case]
    backend = opened(HipFiberBackend, spec, num_blocks, seed=-9)
    assert asked(backend, "sampled") == reference_tokens(spec, ASKED["sampled"])


def test_attention_of_so_many_heads_that_a_thread_stages_eight_values(monkeypatch):
    """Of splits that o_proj's readers join, and of threads without a value."""
    monkeypatch.setattr(header, "split_least", lambda spec: 8)
    spec = f16_spec(num_layers=1, hidden_size=48, num_heads=66, num_kv_heads=2, head_dim=64, intermediate_size=64)
    backend = opened(HipFiberBackend, spec, 6)
    reference = ReferenceBackend(ArrayWeights(spec), BackendOptions())
    state = stage_inputs(spec, "attention", 0, 2, 20)
    want, got = (b.run_stage("attention", 0, state)["attention"] for b in (reference, backend))
    assert error_of(got, want) < 1e-3  # splits are rounded, and what they are joined to


@pytest.mark.parametrize("head_dim", some_always([16, 128], 128))
@pytest.mark.parametrize("heads", some_always([1, 2, 3, 4, 5, 6, 7, 8], 1, 3, 5))
def test_attention_of_a_group_of_heads_over_more_tiles_than_warps_have_results(heads, head_dim):
    """How many threads share a head's rows differs with the group (scores.h)."""
    spec = f16_spec(
        num_layers=1,
        hidden_size=24,
        num_heads=heads,
        num_kv_heads=1,
        head_dim=head_dim,
        intermediate_size=32,
        max_context=512,
    )
    backend = opened(HipFiberBackend, spec, 1, context=512)
    reference = ReferenceBackend(ArrayWeights(spec), BackendOptions())
    state = stage_inputs(spec, "attention", 0, 3, 400)
    want, got = (b.run_stage("attention", 0, state)["attention"] for b in (reference, backend))
    assert error_of(got, want) < 1e-3


@slow
@pytest.mark.parametrize(("case", "gpus"), [("llama", 1), ("llama", 2), ("laneformer", 1)])
def test_all_kernels_pass_the_check_of_a_new_gpu(case, gpus):
    class Several(HipFiberBackend):
        column_counts, chunk_positions = (2, 4, 8), 8

    small = small_model(CASES[case].spec, num_gpus=gpus)
    kernels = check_requests(Several, small, "a CPU", 8, gpus)
    assert len(kernels) == 5


def test_a_block_that_never_comes_is_named():
    """A wait bounds itself (own_waits.h)."""
    backend = opened(HipFiberBackend, CASES["llama"].spec, CASES["llama"].num_blocks, seed=-9)
    assert asked(backend, "greedy") == expected("llama")
    backend.kernel.absent, backend.wait_ns = 0, 2_000_000  # 2,000 rounds
    ((failed,),) = serve(backend, ASKED["greedy"].request()).values()
    assert isinstance(failed, Failure) and re.search(r"expired: .*word 0 of places", str(failed.error))


# ---- judged: a CPU thread for every block ----


@pytest.mark.parametrize(
    ("judge", "case"),
    [
        pytest.param("races", "split"),
        *(pytest.param("races", c, marks=slow) for c in ("llama", "laneformer", "four rows")),
        *(pytest.param("bounds", c, marks=slow) for c in columns.SHARED),
    ],
)  # fmt: skip
def test_columns_under_a_judge(judge, case):
    spec, names = columns.spec_of(case), columns.SHARED[case]
    blocks, lengths = columns.BLOCKS.get(case, 8), columns.LENGTHS.get(case, {})
    count = max(2, len(names))
    walk = HipColumnThreadWalk(spec, ArrayWeights(spec), blocks, count, judge=JUDGES[judge], **lengths)
    walk.serve([columns.ASKED[name].request(i) for i, name in enumerate(names)], 1, UNLIMITED_NS)
    assert (walk.verdict.code, walk.verdict.report) == (0, "")
    for i, name in enumerate(names):
        said = [word & 0xFFFFFFFF for word in walk.memory.outbox[i, :, 0].tolist() if word]
        assert said == columns.expected(case, name)


@slow
@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("case", [*CASES, "split"])
def test_one_token_under_a_judge(case, judge):
    spec, lengths = (SPLIT, LENGTHS) if case == "split" else (CASES[case].spec, {})
    walk = HipThreadWalk(spec, ArrayWeights(spec), 8, judge=JUDGES[judge], **lengths)
    for seed, name in enumerate(SPLIT_NAMES if case == "split" else NAMES[case][:2], 1):
        one = ASKED[name]
        words = walk.words(one.prompt, TOKENS, one.params)
        walk.run(words, one.prompt, seed, UNLIMITED_NS)
        assert (walk.verdict.code, walk.verdict.report) == (0, "")
        assert walk.tokens() == (split_tokens(name) if case == "split" else expected(case, name))
