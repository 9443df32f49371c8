"""Library prefill on several ranks, on a CPU: each rank's keys, values and last streams against the reference's."""

import math
from contextlib import nullcontext

import pytest
import torch

from kog_triton.backends.prefill import forward
from kog_triton.backends.prefill import ranks as rank_passes
from kog_triton.backends.prefill.library import chunks_of
from kog_triton.backends.prefill.slices import Piece, PromptRun, Rate
from kog_triton.errors import ModelError, RequestError
from kog_triton.schedule.schedule import build
from tests.lib.prefill_cases import (
    BF16,
    F32,
    SPECS,
    TOLERANCE,
    empty_cache,
    expected,
    expected_streams,
    prefill_of,
    tokens_of,
)
from tests.lib.rank_prefill_cases import empty_caches, rank_prefill_of

RANKS = [
    ("llama", 2),
    ("biases", 2),
    ("mistral", 2),
    ("two to a KV head, FFN padded", 4),
    ("lanes at once", 2),
    ("lanes of all kinds", 2),
    ("lanes of all kinds", 4),
    ("lanes, far apart", 4),
]


def expected_by_shard(name, ranks, dtype, count):
    """The reference's keys and values as shards hold them, [layers, shards, K, 2, count, d]."""
    want, schedule = expected(name, dtype, count), build(SPECS[name], ranks)
    if SPECS[name].num_lanes > 1:
        return want
    heads = want[:, 0].repeat_interleave(schedule.kv_copies, 1)
    return heads.unflatten(1, (ranks, -1))


def errors(got, want):
    dims = (1, 2, 4, 5)
    return ((got.float() - want).square().mean(dims) / want.square().mean(dims)).sqrt()


@pytest.mark.parametrize(
    ("name", "ranks", "ends", "dtype"),
    [(*case, ends, F32) for case in RANKS for ends in ([13], [3, 29, 30, 64])]
    + [("biases", 2, [40], BF16), ("lanes of all kinds", 4, [40], BF16)],
    ids=str,
)
def test_keys_values_and_streams_equal_the_reference(name, ranks, ends, dtype):
    ours, caches, first = rank_prefill_of(name, ranks, dtype), empty_caches(name, ranks, dtype), 0
    spec, each = SPECS[name], build(SPECS[name], ranks).shards_per_rank
    for end in ends:
        streams = [torch.full((each, spec.hidden_size), torch.nan) for _ in range(ranks)]
        ids = tokens_of(ends[-1])[first:end]
        ours.begin(ids, first, caches, streams).advance(math.inf)
        held, want = torch.cat(caches, 1), expected_by_shard(name, ranks, dtype, end)
        assert errors(held[..., :end, :], want).max() < TOLERANCE[dtype]
        assert held[..., end:, :].isnan().all()
        last = expected_streams(name, dtype, end)
        for own in torch.cat(streams).split(spec.num_lanes):
            assert (own - last).norm() < TOLERANCE[dtype] * last.norm()
        first = end


@pytest.mark.parametrize("ranks", [2, 4])
def test_lanes_leave_the_bits_that_they_leave_on_one_gpu(ranks):
    """In bfloat16: float32's last bits depend, with some processors, on how many matrices a product has."""
    name, dtype = "lanes of all kinds", BF16
    one, whole = prefill_of(name, dtype, buckets=(4,)), empty_cache(name, dtype)
    one.run(tokens_of(40), 0, whole)
    caches = empty_caches(name, ranks, dtype)
    rank_prefill_of(name, ranks, dtype).begin(tokens_of(40)[:-1], 0, caches).advance(math.inf)
    assert torch.equal(torch.cat(caches, 1)[..., :39, :], whole[..., :39, :])


def test_ranks_of_a_plain_model_keep_equal_streams():
    streams = [torch.zeros(1, SPECS["biases"].hidden_size) for _ in range(2)]
    run = rank_prefill_of("biases", 2, BF16).begin(tokens_of(20), 0, empty_caches("biases", 2, BF16), streams)
    run.advance(math.inf)
    assert torch.equal(*streams) and streams[0].any()


def test_slices_leave_the_bits_of_a_run_at_once():
    whole, cut = empty_caches("llama", 2), empty_caches("llama", 2)
    ours, slices = rank_prefill_of("llama", 2), 1
    ours.begin(tokens_of(20), 0, whole).advance(math.inf)
    run = ours.begin(tokens_of(20), 0, cut)
    while not run.advance(0):
        slices += 1
    assert slices == 3 * (5 * SPECS["llama"].num_layers - 4)
    assert all(torch.equal(a[..., :20, :], b[..., :20, :]) for a, b in zip(whole, cut, strict=True))


def assert_right(caches, count):
    held, want = torch.cat(caches, 1)[..., :count, :], expected_by_shard("llama", 2, F32, count)
    assert errors(held, want).max() < TOLERANCE[F32]


@pytest.mark.parametrize("freed", ["before the next one", "inside of it"])
def test_behind_a_prompt_that_is_called_off_the_next_one_is_right_and_leaves_no_outputs(freed):
    ours, caches = rank_prefill_of("llama", 2), empty_caches("llama", 2)
    run, following = (ours.begin(tokens_of(20), 0, caches) for _ in range(2))
    for _ in range(8):  # in the first layer's join and beyond
        assert not run.advance(0)
    assert run.filled == 0 and all(o is not None for o in ours._exchange.every)
    if freed == "inside of it":
        left = ours._exchange.every[0]
        while (every := ours._exchange.every[0]) is None or every is left:
            assert not following.advance(0)  # to where all ranks' outputs are there, and unread
    del run
    while not following.advance(0):
        pass
    assert_right(caches, 20)
    assert ours._exchange.every == ours._exchange.sent == [None, None]


def test_behind_a_prompt_that_failed_on_one_rank_the_next_one_is_right(monkeypatch):
    """The other rank's output was on its way, and the failed run is still held: the pass ends where it failed."""
    ours, caches = rank_prefill_of("llama", 2), empty_caches("llama", 2)
    run, matrices = ours.begin(tokens_of(20), 0, caches), ours._passes[1].matrices
    right = matrices.product

    def fails(layer, stage, *others):
        if stage == "o_proj":
            assert ours._exchange.sent[0] is not None and ours._exchange.sent[1] is None
            raise torch.OutOfMemoryError("no memory")
        return right(layer, stage, *others)

    with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
        patched.setattr(matrices, "product", fails)
        run.advance(math.inf)
    assert ours._exchange.every == ours._exchange.sent == [None, None]
    ours.begin(tokens_of(20), 0, caches).advance(math.inf)
    assert_right(caches, 20)


def test_outputs_go_to_all_ranks_between_their_pieces(monkeypatch):
    """Not within them: a copy behind one GPU's next product would have the other wait for that."""
    ours, told = rank_prefill_of("llama", 2, chunk=40), []
    right = rank_passes.Exchange.deliver

    def deliver(self):
        if any(o is not None for o in self.sent):
            told.append("all")
        right(self)

    def noting(rank, product):
        return lambda layer, stage, *others: told.append((rank, stage)) or product(layer, stage, *others)  # fmt: skip

    monkeypatch.setattr(rank_passes.Exchange, "deliver", deliver)
    for rank, walk in enumerate(ours._passes):
        monkeypatch.setattr(walk.matrices, "product", noting(rank, walk.matrices.product))
    ours.begin(tokens_of(20), 0, empty_caches("llama", 2)).advance(math.inf)
    layer = [(r, s) for s in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") for r in range(2)]
    layer = [*layer[:4], "all", *layer[4:], "all"]
    assert told == layer * (SPECS["llama"].num_layers - 1) + layer[:2]


def test_a_run_is_waited_for_on_all_gpus(monkeypatch):
    waited = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def record_event(self):
            return self

        def query(self):
            waited.append(self.device)
            return True

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    others = [torch.device("cuda", 1), torch.device("cuda", 2)]
    run = PromptRun(
        0,
        2,
        lambda at_once: iter([Piece(0, 1.0), Piece(1, 1.0)]),
        nullcontext,
        torch.device("cpu"),
        Rate(),
        others=others,
    )
    assert not run.advance(0) and waited == []
    run.wait()
    assert waited == others


def test_what_does_not_fit_is_refused():
    ours, caches = rank_prefill_of("llama", 2), empty_caches("llama", 2)
    with pytest.raises(RequestError, match="positions 60 to 64 do not fit a cache of 64"):
        ours.begin([1] * 5, 60, caches)
    with pytest.raises(RequestError, match="token id 101 is outside the vocabulary"):
        ours.begin([1, 101], 0, caches)
    with pytest.raises(ModelError, match="library prefill wants"):
        ours.begin([1], 0, [caches[0], caches[1][:, :, :1, :, :, :4]])


@pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 7), (0, 8), (5, 2), (5, 3), (6, 30), (14, 7)])
def test_passes_end_at_multiples_of_a_chunk(first, count):
    parts = chunks_of(first, count, 7)
    assert [i for part in parts for i in range(count)[part]] == list(range(count))
    assert all((first + part.stop) % 7 == 0 for part in parts[:-1])
    assert all(0 < part.stop - part.start <= 7 for part in parts)


# ---- planted faults ----


def own_alone(self, own):
    return own


def own_only(self, x, o, how, delayed):
    every = self._outputs.all(o)
    x.add_(forward.total_of(every))
    delayed.append((o, every))


@pytest.mark.parametrize(
    ("place", "name", "wrong", "model"),
    [
        (rank_passes.RankOutputs, "all", own_alone, "llama"),
        (forward.PrefillPass, "_join", own_only, "lanes of all kinds"),
    ],
)
def test_a_planted_fault_is_seen(place, name, wrong, model, monkeypatch):
    monkeypatch.setattr(place, name, wrong)
    ours, caches = rank_prefill_of(model, 2), empty_caches(model, 2)
    ours.begin(tokens_of(30), 0, caches).advance(math.inf)
    want = expected_by_shard(model, 2, F32, 30)
    assert not errors(torch.cat(caches, 1)[..., :30, :], want).max() < TOLERANCE[F32]
