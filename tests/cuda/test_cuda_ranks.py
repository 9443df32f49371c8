"""The CUDA kernel of one token on several ranks, without a GPU: its own C++ as fibers (lib/cuda_ranks.py).

What it computes is compared with the reference backend that walks the same ranks, what it samples with the definition.
"""

import re

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import ModelError
from kog_triton.model.spec import Head, Reduce
from tests.lib.cuda_planting import plant
from tests.lib.cuda_ranks import RankThreadWalk, RankWalk
from tests.lib.cuda_sampling import SETTINGS, assert_sampled, resolved
from tests.lib.lowering_cases import mixed_lanes
from tests.lib.ring_walker import f16_spec, spec_of

TWO = f16_spec(vocab_size=100)
MODELS = {  # spec, ranks, options of the walk, most that logits may be off
    "fp16": (TWO, 2, {"num_blocks": 2}, 0.015),
    "bf16, biases, norms, tied": (
        spec_of(
            qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tied_embeddings=True, vocab_size=100,
        ),
        2,
        {},
        0.06,
    ),
    "windows, splits, sizes that divide by little": (
        f16_spec(hidden_size=54, intermediate_size=90, head_dim=8, vocab_size=102, windows=(5, 0, 3)),
        2,
        {"split_least": 2},
        0.015,
    ),
    "four ranks, two to a KV head, FFN padded": (
        f16_spec(
            num_heads=8, intermediate_size=90, mlp_bias=True, qkv_bias=True, qk_norm=True, vocab_size=100
        ),
        4,
        {"num_blocks": 2},
        0.015,
    ),
}  # fmt: skip


def tokens_of(spec, count):
    return np.random.default_rng(0).integers(0, spec.vocab_size, count).tolist()


def test_a_walk_waits_by_its_own_limit():
    """Of fibers it counts rounds and of GPUs nanoseconds, of which 16,384 pass before the second rank has begun."""

    class Noting(RankWalk):
        limit = 123

        def _start(self, arguments, seed, absent):
            return [argument.limit for argument in arguments]

    walk = Noting(TWO, RandomWeights(TWO), 2, 2)
    assert walk.run(walk.words([1, 2], 3), [1, 2]) == [123, 123]
    assert walk.run(walk.words([1, 2], 3), [1, 2], limit=9) == [9, 9]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_references_on_as_many_ranks(name):
    """Every position's, under two orders of the blocks: equal bits."""
    spec, ranks, options, limit = MODELS[name]
    weights = RandomWeights(spec)
    walk, tokens = RankWalk(spec, weights, ranks, **options), tokens_of(spec, 9)
    ours = walk.forward_logits(tokens)
    assert np.array_equal(ours, walk.forward_logits(tokens, seed=1))
    reference = ReferenceBackend(weights, BackendOptions(num_gpus=ranks))
    expected = reference.forward_logits(tokens)
    assert expected.std() > 4
    assert np.sqrt(((ours - expected) ** 2).mean()) < limit


@pytest.mark.parametrize(
    ("head", "ranks", "num_blocks"),
    [
        (Head.SUM_THEN_NORM, 2, 4),
        (Head.VOCAB_PARALLEL, 4, 2),
        pytest.param(Head.MEAN, 2, 8, marks=pytest.mark.slow),
        pytest.param(Head.CONCAT, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_lanes_are_the_same_function_on_any_number_of_ranks(head, ranks, num_blocks):
    """Delayed tensor parallelism: modules that reduce late, at once and never, and lanes that are mixed for the head.
    The reference knows of no ranks here."""
    spec = mixed_lanes(head, lane_norms=head is Head.MEAN)
    weights = RandomWeights(spec)
    walk, tokens = RankWalk(spec, weights, ranks, num_blocks), tokens_of(spec, 5)
    ours = walk.forward_logits(tokens)
    expected = ReferenceBackend(weights, BackendOptions()).forward_logits(tokens)
    assert expected.std() > 4
    assert np.sqrt(((ours - expected) ** 2).mean()) < 0.02
    for region in ("mlp_out_delayed", "attention_out_delayed"):  # of the last rank, which falls behind
        walk.store_late(region, rounds=200, memory=walk.ranks[-1])
        assert np.array_equal(ours, walk.forward_logits(tokens, seed=1))


@pytest.fixture(scope="module")
def walk():
    return RankWalk(TWO, RandomWeights(TWO), 2, 2)


def test_greedy_tokens_are_the_references(walk):
    prompt = tokens_of(TWO, 3)
    tokens, outcome = walk.generate(prompt, 6, seed=1)
    reference = ReferenceBackend(RandomWeights(TWO), BackendOptions(num_gpus=2))
    logits = reference.forward_logits(prompt + tokens)[len(prompt) - 1 : -1]
    best = np.sort(logits, 1)[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 0.05  # which the kernel's rounding does not bridge
    assert (tokens, outcome) == (logits.argmax(1).tolist(), 2)


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "top_p, flat", "penalties", "bad words", "all at once"])
def test_sampled_tokens_are_the_definitions(walk, name):
    assert_sampled(walk, [1, 2, 3, 2], 3, resolved(TWO.vocab_size, **SETTINGS[name]))


def test_a_thread_receives_from_several_blocks(tmp_path):
    """As where eight GPUs have more blocks than a block has threads that receive."""
    spec = f16_spec(vocab_size=400, hidden_size=144, num_layers=1)
    include = plant(tmp_path, ("block.h", "kTakers = kConsumers;", "kTakers = 32;"))
    walk = RankWalk(spec, RandomWeights(spec), 2, 18, include=include)
    assert 32 < 2 * walk.layout.lowering.num_blocks < 64
    params = resolved(spec.vocab_size, top_k=30, top_p=0.8, temperature=8.0)
    assert_sampled(walk, [1, 2, 3], 2, params)


@pytest.mark.parametrize("region", ["attention_out_now", "mlp_out_now"])
@pytest.mark.parametrize("rank", [0, 1])
def test_stores_that_land_late_change_nothing(walk, region, rank):
    """In one rank's words alone: the other one goes ahead as far as the exchanges let it."""
    tokens = tokens_of(TWO, 5)
    expected = walk.forward_logits(tokens)
    walk.store_late(region, rounds=100, memory=walk.ranks[rank])
    assert np.array_equal(walk.forward_logits(tokens, seed=1, limit=1 << 14), expected)


FAULTS = {
    "a word goes to the own rank alone": (
        "residual.h", "if (kRanks > 1 && to_all)", "if (kRanks > 1 && to_all && false)"
    ),
    "a rank's candidates stay with it": (
        "sample.h", "argmax_words(b, heads, block_of_all(b))", "argmax_words(b, heads, b.block)"
    ),
    "sums in the order of arrival": (
        "residual.h", "return base + i / kGroups * kStride",
        "return base + (i / kGroups + rank_of(b.p)) % kCount * kStride",
    ),
    "values of one lane twice": ("residual.h", "i / kGroups * kStride + at[i]", "0 * kStride + at[i]"),
    "a rank scores the first ids": ("block.h", "? b.lane : rank_of(b.p))", "? b.lane : 0)"),
    "a buffer that nobody looks into": (
        "residual.h", "to = b.p.words + Now::kOffset + ((counts.now & 1) * kLanes",
        "to = b.p.words + Now::kOffset + ((counts.now & 0) * kLanes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, tmp_path, walk):
    spec, tokens = TWO, tokens_of(TWO, 4)
    expected = walk.forward_logits(tokens)
    faulty = RankWalk(spec, RandomWeights(spec), 2, 2, include=plant(tmp_path, FAULTS[name]))
    words = faulty.words(tokens[:2], 4)
    faulty.run(words, tokens[:2], limit=4000)
    if any(report[0] or report[8] for report in faulty.reports()):
        return
    found = (faulty.tokens(), faulty.outcome) == walk.generate(tokens[:2], 4)
    assert not found or not np.array_equal(faulty.forward_logits(tokens), expected)


# ---- a rank that does not come, or leaves ----


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_leave_when_one_is_never_launched(walk, rank):
    rounds = walk.run(walk.words([1, 2], 40), [1, 2], seed=3, limit=2000, absent=rank)
    assert 2000 < rounds < 4500
    ((layer, place),) = [at for r, at in walk.expired().items() if r != rank]
    assert layer == 0 and re.fullmatch(r"attention_out, word \d+ of attention_out_now", place)
    assert (walk.ranks[1 - rank].mailbox[2], walk.tokens()) == (4, [])
    assert walk.generate(tokens_of(TWO, 3), 2)[1] == 2  # and the next request runs


def test_ranks_leave_when_one_leaves_behind_a_token(walk):
    walk.most_steps = {1: 5}  # of rank 1 alone: it ends behind its fourth token
    try:
        rounds = walk.run(walk.words([1, 2], 40), [1, 2], seed=3, limit=2000)
    finally:
        walk.most_steps = {}
    assert rounds > 2000
    ((rank, (layer, place)),) = walk.expired().items()
    assert (rank, layer) == (0, 0) and "attention_out_now" in place
    assert len(walk.tokens()) == 4
    assert walk.generate(tokens_of(TWO, 3), 2)[1] == 2


# ---- what is refused ----


@pytest.mark.parametrize(
    ("spec", "ranks", "says"),
    [
        (f16_spec(vocab_size=101), 2, "vocab_size 101 does not divide over 2 GPUs"),
        (mixed_lanes(Head.MEAN), 3, "4 lanes do not divide over 3 GPUs: choose one of 1, 2, 4"),
        (f16_spec(num_heads=6), 4, "6 heads with 2 KV heads do not divide over 4 GPUs"),
    ],
)
def test_what_ranks_cannot_run_is_refused(spec, ranks, says):
    with pytest.raises(ModelError, match=says):
        RankWalk(spec, RandomWeights(spec), ranks, 4)


# ---- with a CPU thread for every block, judged by ThreadSanitizer ----


def test_blocks_of_ranks_race_for_nothing(tmp_path):
    """Bit for bit what one thread computes; a fence left out is reported."""
    spec = TWO.replace(num_layers=2, windows=(0, 0), reduce_attention=(Reduce.NOW,) * 2, reduce_mlp=(Reduce.NOW,) * 2)
    weights, ids = RandomWeights(spec), [5, 17, 60, 31]
    one_thread = RankWalk(spec, weights, 2, 2, split_least=2)
    ours = RankThreadWalk(spec, weights, 2, 2, split_least=2)
    assert np.array_equal(ours.forward_logits(ids, 1), one_thread.forward_logits(ids))
    assert (ours.verdict.code, ours.verdict.report) == (0, "")
    params = resolved(spec.vocab_size, **SETTINGS["all at once"])
    tokens = ours.generate(ids[:2], 2, params, seed=2)
    assert tokens == one_thread.generate(ids[:2], 2, params)
    assert (ours.verdict.code, ours.verdict.report) == (0, "")
    include = plant(tmp_path, ("layer.h", "  acquire_gpu();\n", ""))
    racing = RankThreadWalk(spec, weights, 2, 2, split_least=2, include=include)
    racing.run(racing.words(ids, 2), ids, seed=2, limit=1 << 21)
    assert racing.verdict.code != 0 and "append" in racing.verdict.places
