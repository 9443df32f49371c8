"""Token columns of the CUDA kernel with a CPU thread for every block, judged by ThreadSanitizer (cuda_threads.py).

Green means what it means in test_cuda_threads.py: no access lacks an order, and words that are seen late and in any
order change no bit of what each request leaves alone.
"""

import itertools

import pytest
import torch

from kog_triton.backends.cuda.layout import batches
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import DType, Head, Reduce
from kog_triton.model.weight_format import FORMATS
from kog_triton.sampling import SamplingParams
from tests.lib.cuda_planting import plant
from tests.lib.cuda_requests import GREEDY, alone, request, tokens_of
from tests.lib.cuda_threads import BOUNDED, JUDGED, ColumnThreadWalk
from tests.lib.cuda_walk import header
from tests.lib.narrow_stages import AWQ, FEW_APART
from tests.lib.narrow_stream import narrow_spec, random_weights
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
INT4 = FORMATS["int4-g128"]
ROOM = 4_000  # so little that of units of 12 steps of K some come from memory, for each unit anew
NARROW = {
    "fp8 blocks": (narrow_spec(FORMATS["fp8-block"], **FEW_APART), 4, 2),
    "int4 g128": (narrow_spec(INT4, **FEW_APART), 4, 2),
    "int4 g128, eight": (narrow_spec(INT4, **FEW_APART), 4, 8),
    "int4 zero points, read": (narrow_spec(AWQ, **FEW_APART | {"intermediate_size": 6144}), 4, 2),
}
JUDGES = {"races": JUDGED, "bounds": BOUNDED}


@pytest.fixture(autouse=True)
def splits(monkeypatch):
    """From the fourth position on several blocks share a head's context, and read what one has appended."""
    monkeypatch.setattr(header, "split_least", lambda spec: 2)
    monkeypatch.setattr(header, "MERGED_LENGTH", 3)


def said(walk, slot, count):
    return [int(w) & 0xFFFFFFFF for w in walk.memory.outbox[slot, :count, 0]]


@pytest.mark.parametrize(
    "name", some_always(["one lane", "lanes", "lanes side by side", "batch behind batch"], "lanes")
)
def test_columns_race_for_nothing(name):
    """With single warps held back (seed 1) and without."""
    spec, blocks, columns = SPECS[name]
    check_judged(ColumnThreadWalk(spec, RandomWeights(spec), blocks, columns), blocks)


@pytest.mark.parametrize(("name", "judge"), some_always(itertools.product(NARROW, JUDGES)))
def test_columns_of_narrow_weights_race_for_nothing_and_stay_in_bounds(name, judge, monkeypatch):
    spec, blocks, columns = NARROW[name]
    if "read" in name:
        monkeypatch.setattr(batches, "scratch_room", lambda lowering: ROOM)
    ours = ColumnThreadWalk(spec, random_weights(spec), blocks, columns, judge=JUDGES[judge])
    lowering = ours.layout.lowering
    read = batches.read_steps(lowering, lowering.schedule.stage("down_proj"), columns)
    assert (read > 0) == ("read" in name)
    check_judged(ours, blocks)


def check_judged(ours, blocks):
    """What each request says and leaves alone, and no report."""
    requests = [request(i, (5, 17 + i, 60), 3, CUT if i == 1 else GREEDY) for i in range(ours.columns)]
    steps, cache = alone(ours.spec, requests, blocks)
    for seed in (1, 2):
        ours.memory.cache.zero_()
        ours.serve(requests, seed)
        assert (ours.verdict.code, ours.verdict.report) == (0, "")
        for slot in steps:
            assert said(ours, slot, 3) == tokens_of(steps[slot])
        assert torch.equal(ours.memory.cache, cache)


@pytest.mark.parametrize("name", some_always(["lanes", "fp8 blocks", "int4 g128"], "lanes"))
def test_a_chunk_races_for_nothing(name):
    spec, blocks, _ = (SPECS | NARROW)[name]
    one = request(0, [(3 + 7 * i) % 101 for i in range(11)], 1)
    steps, cache = alone(spec, [one], blocks)
    ours = ColumnThreadWalk(spec, random_weights(spec), blocks, 4, chunk=True)
    ours.serve([one], 1)
    assert (ours.verdict.code, ours.verdict.report) == (0, "")
    assert said(ours, 0, 1) == tokens_of(steps[0])
    assert torch.equal(ours.memory.cache, cache)


RACES = {
    "operands are taken before all warps have staged theirs": ("columns/stream.h", "  sync_staged<kOwn>();\n", ""),
    "rows of the cache are sent without a fence": ("columns/layer.h", "if (last) release_gpu();", ""),
    "partial sums are overwritten while they are read": (
        "rows.h",
        "  if (!Share::kAll && (Stage::kSumBuffers == 1 || last)) sync_consumers();  // the sums have been read\n",
        "",
    ),
}


# Of narrow weights: the model, header, before, after.
NARROW_RACES = {
    "bytes of x are taken before all warps have staged theirs": (
        "int4 g128",
        "columns/stream.h",
        "  sync_staged<kOwn>();\n",
        "",
    ),
    "scales are read behind their chunk's release": (
        "fp8 blocks",
        "narrow.h",
        "    if constexpr (Weights::kScaleRows > 0) {\n      const u8* record = ring.weights(b)",
        "    Ring held = ring;\n    if (mine) ring.release(b);\n    mine = false;\n"
        "    if constexpr (Weights::kScaleRows > 0) {\n      const u8* record = held.weights(b)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RACES, *NARROW_RACES])
def test_a_planted_race_is_reported(name, tmp_path):
    model, *edit = NARROW_RACES.get(name) or ("lanes", *RACES[name])
    spec, blocks, _ = (SPECS | NARROW)[model]
    include = plant(tmp_path, tuple(edit))
    racing = ColumnThreadWalk(spec, random_weights(spec), blocks, 2, include=include)
    requests = [request(i, (5, 17 + i, 60), 3) for i in range(2)]
    for seed in range(1, 5):
        racing.serve(requests, seed, LIMIT)
        if racing.verdict.code != 0:
            return
    pytest.fail("nobody noticed")
