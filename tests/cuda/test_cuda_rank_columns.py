"""Columns and chunks of the CUDA kernel on several ranks, without a GPU: its own C++ as fibers
(lib/cuda_rank_columns.py).

Whoever shares a step, a request's tokens, log-probabilities, keys and values are those of the same request alone on
the kernel of one token on as many ranks, bit for bit; and its logits the reference's.
"""

import re

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.backends.token_words import Outcome
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import Head, Reduce
from kog_triton.sampling import SamplingParams
from tests.lib.column_cases import EXTRAS, MIXED
from tests.lib.cuda_planting import plant
from tests.lib.cuda_rank_columns import RankColumnThreadWalk, RankColumnWalk, alone_on_ranks, assert_same, left_by
from tests.lib.cuda_ranks import RankWalk
from tests.lib.cuda_requests import GREEDY, PROMPTS, prompt_of, request
from tests.lib.lowering_cases import lanes, mixed_lanes
from tests.lib.ring_walker import f16_spec, spec_of
from tests.lib.slow import some_always

TOLD = SamplingParams(temperature=1.0, logprobs=2, seed=3)
TWO = f16_spec(vocab_size=102)
FEW_SPLITS = {
    "split_least": 2,
    "merged_length": 6,
}  # from the seventh position on several blocks share a head's context
SHAPES = {  # spec, ranks, columns, blocks, options of both walks
    "fp16": (TWO, 2, 4, 2, {}),
    "bf16, biases, norms, tied": (spec_of(**EXTRAS, tied_embeddings=True, vocab_size=102), 2, 2, 3, FEW_SPLITS),
    "windows, splits, sizes that divide by little": (
        f16_spec(hidden_size=54, intermediate_size=90, head_dim=8, vocab_size=102, windows=(5, 0, 3)),
        2, 8, 4, FEW_SPLITS,
    ),
    "four ranks, two to a KV head, FFN padded": (
        f16_spec(num_heads=8, intermediate_size=90, mlp_bias=True, qkv_bias=True, qk_norm=True, vocab_size=104),
        4, 8, 2, FEW_SPLITS,
    ),
    "eight ranks of one KV head": (
        f16_spec(num_layers=2, num_heads=16, num_kv_heads=1, head_dim=8, vocab_size=104), 8, 2, 1, {},
    ),
    # Operands of x that do not fit into registers: batches of gate_up_proj take turns with two rooms.
    "batch behind batch": (f16_spec(hidden_size=320, intermediate_size=400, num_layers=1, vocab_size=102), 2, 8, 2, {}),
}  # fmt: skip
LANES = {
    "the sum, two ranks": (mixed_lanes(Head.SUM_THEN_NORM), 2, 4, 4, {}),
    "rows of each lane, four ranks": (mixed_lanes(Head.VOCAB_PARALLEL), 4, 2, 2, {}),
    "the mean, gains of each lane": (mixed_lanes(Head.MEAN, lane_norms=True), 4, 8, 1, {}),
    "side by side": (mixed_lanes(Head.CONCAT), 2, 4, 2, {}),
    "eight ranks, a lane each": (
        lanes(2, intermediate_size=96).replace(num_lanes=8, num_kv_heads=8, vocab_size=104), 8, 2, 1, {},
    ),
    # No lane ever waits for another: a rank may be a token ahead.
    "lanes that never meet": (
        f16_spec(num_lanes=2, num_layers=2, vocab_size=102, head=Head.VOCAB_PARALLEL,
                 reduce_attention=(Reduce.OWN,) * 2, reduce_mlp=(Reduce.OWN,) * 2),
        2, 4, 2, {},
    ),
}  # fmt: skip


def requests_of(columns, count=4):
    """Prompts of several lengths, of which one is told its log-probabilities."""
    return [request(i, PROMPTS[i] * 2, count, TOLD if i == 1 else GREEDY) for i in range(columns)]


def last_logits(walk, column):
    """Of a column that keeps them, each rank's ids."""
    rows = [slice(*walk.layout.lowering.schedule.head_rows(r)) for r in range(len(walk.ranks))]
    return np.concatenate([m.scores[1 + column, own].numpy() for m, own in zip(walk.ranks, rows, strict=True)])


FOUR = "four ranks, two to a KV head, FFN padded"


@pytest.mark.parametrize("name", some_always([*SHAPES, *LANES], "fp16", "eight ranks, a lane each"))
def test_columns_on_ranks_compute_what_a_kernel_of_one_token_does(name):
    spec, ranks, columns, blocks, options = (SHAPES | LANES)[name]
    weights, requests = RandomWeights(spec), requests_of(columns)
    expected = alone_on_ranks(RankWalk(spec, weights, ranks, blocks, **options), requests)
    walk = RankColumnWalk(spec, weights, ranks, columns, blocks, **options)
    assert_same(walk.serve(requests, seed=-7), expected)
    # The reference walks as many ranks, or knows of none: lanes define the function.
    told, tokens = requests[1], expected[1][0]
    assert_same(walk.serve([told]), {1: expected[1]})
    reference = ReferenceBackend(weights, BackendOptions(num_gpus=1 if name in LANES else ranks))
    logits = reference.forward_logits([*told.prompt, *tokens[:-1]])[-1]
    assert logits.std() > 2
    assert np.sqrt(((last_logits(walk, 0) - logits) ** 2).mean()) < 0.06


@pytest.fixture(scope="module")
def one():
    return RankWalk(TWO, RandomWeights(TWO), 2, 2)


@pytest.fixture(scope="module")
def walk():
    return RankColumnWalk(TWO, RandomWeights(TWO), 2, 8, 2)


def test_every_way_to_choose_works_beside_every_other(one, walk):
    requests = [request(i, PROMPTS[i], 4, p) for i, (n, p) in enumerate(MIXED.items()) if n != "masked"]
    expected = alone_on_ranks(one, requests)
    for seed in (0, -3):
        assert_same(walk.serve(requests, seed), expected)


@pytest.mark.parametrize("region", ["attention_out_sent", "mlp_out_sent"])
@pytest.mark.parametrize("rank", [0, 1])
def test_stores_that_land_late_change_nothing(one, walk, region, rank):
    """In one rank's words alone: the other one goes ahead as far as the exchanges let it."""
    requests = requests_of(4, 2)
    expected = alone_on_ranks(one, requests)
    walk.store_late(region, rounds=60, memory=walk.ranks[rank])
    assert_same(walk.serve(requests, seed=1), expected)


def test_the_hosts_word_to_rank_0_is_heard_by_all_at_the_same_token(one, walk):
    """Also where one column's prompt goes on while another has logits."""
    requests = [request(i, p, 4) for i, p in enumerate(((1, 2, 5), (3, 4), (7, 8, 9, 6)))]
    expected = alone_on_ranks(one, requests)
    for seed in (0, 1, 2):
        walk.write(requests)
        walk.launch([0, 1, 2], seed, control=Outcome.YIELD)
        assert walk.endings() == {(Outcome.YIELD, 1)}
        assert [len(left_by(walk, slot)[0]) for slot in range(3)] == [0, 1, 0]
        assert_same(walk.go_on(requests), expected)


NEVER = "lanes that never meet"


@pytest.mark.slow
def test_a_rank_may_be_a_token_ahead_of_one_that_picks_late(tmp_path):
    spec, ranks, columns, blocks, _ = LANES[NEVER]
    weights, requests = RandomWeights(spec), requests_of(columns, 6)
    expected = alone_on_ranks(RankWalk(spec, weights, ranks, blocks), requests)
    pick = "  Candidate best = best_of_rank(b, 0, column, epoch, control);\n"
    wait = "  for (int i = 0; rank_of(b.p) == 1 && i < 400; i++) sleep_a_while();\n"
    late = "columns/head.h", pick, wait + pick
    one_buffer = "columns/head.h", "% ColumnBestWords::kBuffers", "% 1"
    for name, edits in (("late", [late]), ("one buffer", [late, one_buffer])):
        include = plant(tmp_path / name, *edits)
        walk = RankColumnWalk(spec, weights, ranks, columns, blocks, include=include)
        assert is_unlike(walk, requests, expected, range(3)) == (name == "one buffer")


# ---- chunks of a prompt ----

CHUNKS = {  # spec, ranks, positions of a chunk, blocks, options of both walks
    "fp16": (TWO, 2, 8, 2, {}),
    "windows, splits, sizes that divide by little": SHAPES["windows, splits, sizes that divide by little"],
    "four ranks, two to a KV head, FFN padded": SHAPES["four ranks, two to a KV head, FFN padded"],
    "the sum, two ranks": LANES["the sum, two ranks"],
    "eight ranks, a lane each": LANES["eight ranks, a lane each"],
}  # fmt: skip


@pytest.mark.parametrize("name", some_always(CHUNKS, "fp16", "the sum, two ranks"))
def test_chunks_on_ranks_leave_what_a_token_at_a_time_leaves(name):
    """Prompts that end within a chunk, with it and with its first position, in one launch and in several."""
    spec, ranks, positions, blocks, options = CHUNKS[name]
    weights = RandomWeights(spec)
    one = RankWalk(spec, weights, ranks, blocks, **options)
    walk = RankColumnWalk(spec, weights, ranks, positions, blocks, chunk=True, **options)
    for length, params in ((positions + 1, GREEDY), (2 * positions, TOLD), (3 * positions + 3, TOLD)):
        asked = request(0, prompt_of(length), 1, params)
        walk.most_steps = dict.fromkeys(range(ranks), 2)
        assert_same(walk.serve([asked], seed=-5), alone_on_ranks(one, [asked]))


# ---- planted faults ----

FAULTS = {
    "an output goes to the own rank alone": (
        "columns/lanes.h", "push(b, words(b, index) + b.lane", "store_relaxed(words(b, index) + b.lane",
    ),
    "an output in another lane's place": (
        "columns/lanes.h", "words(b, index) + b.lane * kOfLane", "words(b, index) + 0 * kOfLane",
    ),
    "a rank's candidates stay with it": (
        "columns/head.h", "b.warp, block_of_all(b)), epoch", "b.warp, b.block), epoch",
    ),
    "a rank picks among its own": ("columns/head.h", "rank < kRanks; rank++", "rank < 1; rank++"),
    "a rank scores the first ids": ("outputs.h", "int first = first_id(b);", "int first = 0;"),
}  # fmt: skip


def is_unlike(walk, requests, expected, seeds=(0, -3)):
    for seed in seeds:
        try:
            assert_same(walk.serve(requests, seed, limit=4000), expected)
        except AssertionError:  # or ranks that do not agree, because a wait expired
            return True
    return False


@pytest.mark.parametrize("name", some_always(FAULTS, "an output goes to the own rank alone"))
def test_a_planted_fault_is_seen(name, tmp_path, one):
    requests = requests_of(4, 3)
    include = plant(tmp_path, FAULTS[name])
    faulty = RankColumnWalk(TWO, RandomWeights(TWO), 2, 8, 2, include=include)
    assert is_unlike(faulty, requests, alone_on_ranks(one, requests))


@pytest.mark.slow
def test_a_lanes_part_that_stays_with_its_rank_is_missed(tmp_path):
    edit = "columns/mix.h", "if (mine) push(b, to + column", "if (mine) store_relaxed(to + column"
    spec, ranks, columns, blocks, _ = LANES["the sum, two ranks"]
    weights, requests = RandomWeights(spec), requests_of(columns)
    expected = alone_on_ranks(RankWalk(spec, weights, ranks, blocks), requests)
    faulty = RankColumnWalk(spec, weights, ranks, columns, blocks, include=plant(tmp_path, edit))
    assert is_unlike(faulty, requests, expected)


# ---- a rank that does not come, or leaves ----


@pytest.fixture(scope="module", params=["requests", "a chunk"])
def columns(request, walk):
    """A walk and what it serves."""
    if request.param == "requests":
        return walk, [columns_request(slot, (1, 2)) for slot in range(3)]
    chunk = RankColumnWalk(TWO, RandomWeights(TWO), 2, 8, 2, chunk=True)
    return chunk, [columns_request(0, prompt_of(40), 1)]


def columns_request(slot, prompt, count=30):
    return request(slot, prompt, count)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_leave_when_one_is_never_launched(columns, rank):
    walk, requests = columns
    walk.write(requests)
    slots = [r.slot for r in requests]
    assert 2000 < walk.launch(slots, seed=3, limit=2000, absent=rank) < 4500
    ((_, (layer, place)),) = [at for at in walk.expired().items() if at[0] != rank]
    assert layer == 0 and re.fullmatch(r"delayed_outputs, word \d+ of attention_out_sent", place)
    assert walk.ranks[1 - rank].mailbox[2] == Outcome.FAILED
    assert walk.go_on(requests)[0][0]  # and the next launch runs


def test_ranks_leave_when_one_leaves_behind_a_step(columns):
    walk, requests = columns
    walk.write(requests)
    walk.most_steps = {1: 3}  # of rank 1 alone
    try:
        rounds = walk.launch([r.slot for r in requests], seed=3, limit=2000)
    finally:
        walk.most_steps = {}
    assert rounds > 2000
    ((rank, (layer, place)),) = walk.expired().items()
    assert (rank, layer) == (0, 0) and "attention_out_sent" in place
    assert int(walk.ranks[0].mailbox[4]) == int(walk.ranks[1].mailbox[4]) == 3  # steps
    assert walk.serve(requests)[0][0]


# ---- with a CPU thread for every block, judged by ThreadSanitizer ----


@pytest.mark.parametrize("name", some_always(["requests", "a chunk", "lanes"], "requests"))
def test_blocks_of_ranks_race_for_nothing(name):
    """Bit for bit what one thread computes."""
    now = (Reduce.NOW,) * 2
    spec = TWO.replace(num_layers=2, windows=(0, 0), reduce_attention=now, reduce_mlp=now)
    if name == "lanes":
        spec = mixed_lanes(Head.SUM_THEN_NORM)
    weights, chunk = RandomWeights(spec), name == "a chunk"
    requests = [request(0, prompt_of(11), 1)] if chunk else requests_of(2, 2)
    expected = alone_on_ranks(RankWalk(spec, weights, 2, 2, **FEW_SPLITS), requests)
    ours = RankColumnThreadWalk(spec, weights, 2, 4 if chunk else 2, 2, chunk=chunk, **FEW_SPLITS)
    for seed in (1, 2):
        assert_same(ours.serve(requests, seed), expected)
        assert (ours.verdict.code, ours.verdict.report) == (0, "")


@pytest.mark.slow
def test_a_planted_race_of_ranks_is_reported(tmp_path):
    include = plant(tmp_path, ("columns/layer.h", "if (last) release_gpu();", ""))
    splits = {"split_least": 2, "merged_length": 3}
    racing = RankColumnThreadWalk(TWO, RandomWeights(TWO), 2, 2, 3, include=include, **splits)
    requests = [request(i, (5, 17 + i, 60), 3) for i in range(2)]
    for seed in range(1, 5):
        racing.write(requests)
        racing.launch([0, 1], seed, limit=1 << 21)
        if racing.verdict.code != 0:
            return
    pytest.fail("nobody noticed")
