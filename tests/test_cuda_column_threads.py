"""Token columns of the CUDA kernel with a CPU thread for every block, judged by ThreadSanitizer (cuda_threads.py).

Green means what it means in test_cuda_threads.py: no access lacks an order, and words that are seen late and in any
order change no bit of what each request leaves alone.
"""

import pytest
import torch
from cuda_planting import plant
from cuda_threads import ColumnThreadWalk
from cuda_walk import header
from ring_walker import spec_of
from test_cuda_columns import GREEDY, alone, request

from kog_triton.model.spec import DType, Reduce
from kog_triton.random_weights import RandomWeights
from kog_triton.sampling import SamplingParams

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
SPECS = {"one lane": (spec_of(num_layers=2, dtype=DType.F16), 3), "lanes": (LANES, 4)}


@pytest.fixture(autouse=True)
def splits(monkeypatch):
    """Two blocks each take a part of a head's context, so that they read what others have appended."""
    monkeypatch.setattr(header, "split_least", lambda spec: 2)


def said(walk, slot, count):
    return [int(w) & 0xFFFFFFFF for w in walk.memory.outbox[slot, :count, 0]]


@pytest.mark.parametrize("name", SPECS)
def test_columns_race_for_nothing(name):
    """With single warps held back (seed 1) and without."""
    spec, blocks = SPECS[name]
    requests = [request(i, (5, 17 + i, 60), 3, CUT if i == 1 else GREEDY) for i in range(2)]
    steps, cache = alone(spec, requests, blocks)
    ours = ColumnThreadWalk(spec, RandomWeights(spec), blocks, 2)
    for seed in (1, 2):
        ours.memory.cache.zero_()
        ours.serve(requests, seed)
        assert (ours.verdict.code, ours.verdict.report) == (0, "")
        for slot in steps:
            assert said(ours, slot, 3) == [step[0] for step in steps[slot]]
        assert torch.equal(ours.memory.cache, cache)


def test_a_chunk_races_for_nothing():
    spec, blocks = SPECS["lanes"]
    one = request(0, [(3 + 7 * i) % 101 for i in range(11)], 1)
    steps, cache = alone(spec, [one], blocks)
    ours = ColumnThreadWalk(spec, RandomWeights(spec), blocks, 4, chunk=True)
    ours.serve([one], 1)
    assert (ours.verdict.code, ours.verdict.report) == (0, "")
    assert said(ours, 0, 1) == [steps[0][0][0]]
    assert torch.equal(ours.memory.cache, cache)


RACES = {
    "sums of other lanes are read before all are there": (
        "columns/lanes.h",
        "      join(b, b.layer, true, x);\n      sync_consumers();",
        "      join(b, b.layer, true, x);",
    ),
    "rows of the cache are sent without a fence": ("columns/layer.h", "if (last) fence_gpu();", ""),
    "partial sums are overwritten while they are read": (
        "columns/matvec.h",
        "  sync_consumers();  // the sums have been read\n",
        "",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RACES)
def test_a_planted_race_is_reported(name, tmp_path):
    spec, blocks = SPECS["lanes"]
    include = plant(tmp_path, RACES[name])
    racing = ColumnThreadWalk(spec, RandomWeights(spec), blocks, 2, include=include)
    requests = [request(i, (5, 17 + i, 60), 3) for i in range(2)]
    for seed in range(1, 5):
        racing.serve(requests, seed, LIMIT)
        if racing.verdict.code != 0:
            return
    pytest.fail("nobody noticed")
