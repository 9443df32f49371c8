"""Token columns of the CUDA kernel with a CPU thread for every block, judged by ThreadSanitizer (cuda_threads.py).

Green means what it means in test_cuda_threads.py: no access lacks an order, and words that are seen late and in any
order change no bit of what each request leaves alone.
"""

import pytest
import torch

from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import GREEDY, alone, request, tokens_of
from tests.lib.cuda_threads import ColumnThreadWalk
from tests.lib.cuda_walk import header
from tests.lib.ring_walker import spec_of
from tests.lib.slow import some_always

NOW, OWN, DELAYED = Reduce.NOW, Reduce.OWN, Reduce.DELAYED
CUT = SamplingParams(temperature=0.9, seed=5, top_k=30, top_p=0.9, logprobs=3)
LIMIT = 1 << 21  # microseconds that a wait may take beside a fault
LANES = spec_of(
    dtype=DType.F16,
    num_layers=4,
    hidden_size=48,
    intermediate_size=48,
    num_lanes=2,
    delay=1,
    reduce_attention=(NOW, DELAYED, DELAYED, DELAYED),
    reduce_mlp=(OWN, NOW, OWN, NOW),
)
# Whose operands of x do not fit into registers: batches of gate_up_proj take turns with two rooms.
WIDE = spec_of(dtype=DType.F16, hidden_size=320, intermediate_size=400, num_layers=1)
SPECS = {  # spec, blocks, columns
    "one lane": (spec_of(num_layers=2, dtype=DType.BF16), 3, 2),
    "lanes": (LANES, 4, 2),
    "lanes side by side": (LANES.replace(head=Head.CONCAT), 4, 2),
    "batch behind batch": (WIDE, 2, 8),
}


@pytest.fixture(autouse=True)
def splits(monkeypatch):
    """From the fourth position on several blocks share a head's context, and read what one has appended."""
    monkeypatch.setattr(header, "split_least", lambda spec: 2)
    monkeypatch.setattr(header, "MERGED_LENGTH", 3)


def said(walk, slot, count):
    return [int(w) & 0xFFFFFFFF for w in walk.memory.outbox[slot, :count, 0]]


@pytest.mark.parametrize(
    "name",
    some_always(["one lane", "lanes", "lanes side by side", "batch behind batch"], "lanes"),
)
def test_columns_race_for_nothing(name):
    """With single warps held back (seed 1) and without."""
    spec, blocks, columns = SPECS[name]
    requests = [request(i, (5, 17 + i, 60), 3, CUT if i == 1 else GREEDY) for i in range(columns)]
    steps, cache = alone(spec, requests, blocks)
    ours = ColumnThreadWalk(spec, RandomWeights(spec), blocks, columns)
    for seed in (1, 2):
        ours.memory.cache.zero_()
        ours.serve(requests, seed)
        assert (ours.verdict.code, ours.verdict.report) == (0, "")
        for slot in steps:
            assert said(ours, slot, 3) == tokens_of(steps[slot])
        assert torch.equal(ours.memory.cache, cache)


def test_a_chunk_races_for_nothing():
    spec, blocks, _ = SPECS["lanes"]
    one = request(0, [(3 + 7 * i) % 101 for i in range(11)], 1)
    steps, cache = alone(spec, [one], blocks)
    ours = ColumnThreadWalk(spec, RandomWeights(spec), blocks, 4, chunk=True)
    ours.serve([one], 1)
    assert (ours.verdict.code, ours.verdict.report) == (0, "")
    assert said(ours, 0, 1) == tokens_of(steps[0])
    assert torch.equal(ours.memory.cache, cache)


RACES = {
    "operands are taken before all warps have staged theirs": (
        "columns/stream.h",
        "  sync_staged<kOwn>();\n",
        "",
    ),
    "rows of the cache are sent without a fence": (
        "columns/layer.h",
        "if (last) release_gpu();",
        "",
    ),
    "partial sums are overwritten while they are read": (
        "rows.h",
        "  if (!Share::kAll && (Stage::kSumBuffers == 1 || last)) sync_consumers();  // the sums have been read\n",
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RACES)
def test_a_planted_race_is_reported(name, tmp_path):
    spec, blocks, _ = SPECS["lanes"]
    include = plant(tmp_path, RACES[name])
    racing = ColumnThreadWalk(spec, RandomWeights(spec), blocks, 2, include=include)
    requests = [request(i, (5, 17 + i, 60), 3) for i in range(2)]
    for seed in range(1, 5):
        racing.serve(requests, seed, LIMIT)
        if racing.verdict.code != 0:
            return
    pytest.fail("nobody noticed")
