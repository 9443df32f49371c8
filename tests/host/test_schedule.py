"""Schedules have the stages and sizes that the model asks for, and check() refuses others.

Sizes are counted by hand from the model, not taken from the schedule.
"""

from dataclasses import replace

import pytest

from kog_triton.errors import DeviceError, ModelError
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import Head, Reduce
from kog_triton.schedule.check import check_partition, check_schedule
from kog_triton.schedule.lowering import Partition, Tiling, default_partition, matrix_stages
from kog_triton.schedule.schedule import Op, Scope, Segment, build
from kog_triton.schedule.topology import GPUS, find_gpu
from tests.lib.ring_walker import spec_of

LAYER = ["qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj"]


def lanes_of(reduce, **changes):
    sizes = {"num_heads": 8, "num_kv_heads": 4, "vocab_size": 100, "num_lanes": 4}
    return spec_of(num_layers=len(reduce), reduce_attention=reduce, reduce_mlp=reduce, **sizes | changes)


LATE = (Reduce.OWN, Reduce.OWN, Reduce.DELAYED, Reduce.DELAYED, Reduce.DELAYED)


# ---- structure ----


def test_a_plain_model_on_one_gpu():
    s = build(spec_of())  # hidden 56, MLP 88, 6 query and 2 key/value heads of 16, vocabulary 101
    assert [(g.name, g.repeat) for g in s.segments] == [("head", 1), ("layers", 3), ("tail", 1)]
    assert [stage.name for _, stage in s.walk()] == ["embed", *LAYER, "lm_head", "sample"]
    sizes = {stage.name: (stage.rows, stage.cols) for stage in matrix_stages(s)}
    assert sizes == {
        "qkv_proj": (160, 56),
        "o_proj": (56, 96),
        "gate_up_proj": (176, 56),
        "down_proj": (56, 88),
        "lm_head": (101, 56),
    }
    assert s.stage("gate_up_proj").outputs == 88 and s.stage("down_proj").outputs == 56
    assert (s.stage("qkv_proj").outputs, s.stage("attention").outputs) == (160, 96)


def test_tensor_parallelism_cuts_heads_and_columns():
    s = build(spec_of(), 2)
    sizes = {stage.name: (stage.rows, stage.cols) for stage in matrix_stages(s)}
    assert sizes["qkv_proj"] == (80, 56) and sizes["o_proj"] == (56, 48)
    assert sizes["gate_up_proj"] == (88, 56) and sizes["down_proj"] == (56, 44)
    assert (s.num_shards, s.shards_per_rank) == (2, 1)
    assert [s.head_rows(rank) for rank in range(2)] == [(0, 50), (50, 101)]


def test_kv_heads_are_held_by_several_ranks():
    s = build(spec_of(num_heads=8, num_kv_heads=2), 8)
    assert (s.shard_heads, s.shard_kv_heads, s.kv_copies) == (1, 1, 4)
    assert (s.stage("qkv_proj").rows, s.stage("o_proj").cols) == (3 * 16, 16)
    one = build(spec_of(num_heads=8, num_kv_heads=2), 2)
    assert (one.shard_heads, one.shard_kv_heads, one.kv_copies) == (4, 1, 1)


def test_an_ffn_that_does_not_divide_is_padded():
    s = build(spec_of(num_heads=4, num_kv_heads=4, intermediate_size=90), 4)
    assert (s.stage("gate_up_proj").rows, s.stage("down_proj").cols) == (48, 24)
    assert build(spec_of(), 2).stage("down_proj").cols == 44  # what divides is left as it is


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_lanes_stay_lanes_on_any_number_of_gpus(ranks):
    s = build(lanes_of(LATE, delay=2), ranks)
    assert (s.num_shards, s.shards_per_rank) == (4, 4 // ranks)
    assert [s.rank_of(shard) for shard in range(4)] == [i * ranks // 4 for i in range(4)]
    assert (s.stage("qkv_proj").rows, s.stage("down_proj").cols) == (64, 22)
    assert s.reduce("o_proj", 1) is Reduce.OWN and s.reduce("down_proj", 2) is Reduce.DELAYED


@pytest.mark.parametrize(
    ("head", "mixes", "rows", "cols"),
    [
        (Head.MEAN, True, 100, 56),
        (Head.SUM_THEN_NORM, True, 100, 56),
        (Head.CONCAT, True, 100, 4 * 56),
        (Head.VOCAB_PARALLEL, False, 25, 56),
    ],
)
def test_every_head_scores_the_vocabulary(head, mixes, rows, cols):
    s = build(lanes_of(LATE, delay=2, head=head))
    names = [stage.name for _, stage in s.walk()]
    assert ("mix" in names) == mixes
    lm_head = s.stage("lm_head")
    assert (lm_head.rows, lm_head.cols) == (rows, cols)
    assert lm_head.scope is (Scope.ALL if mixes else Scope.SHARD)


def test_tied_models_score_with_the_embedding():
    assert build(spec_of(tied_embeddings=True)).stage("lm_head").weights == ("embed",)
    assert build(spec_of()).stage("lm_head").weights == ("lm_head",)


@pytest.mark.parametrize(
    ("spec", "ranks", "says"),
    [
        (spec_of(), 0, "cannot run on 0 GPUs"),
        (spec_of(), 3, "6 heads with 2 KV heads do not divide over 3 GPUs: choose one of 1, 2, 6"),
        (spec_of(num_heads=15, num_kv_heads=5), 2, "choose one of 1, 5"),
        (lanes_of(LATE, delay=2), 3, "4 lanes do not divide over 3 GPUs"),
        (lanes_of(LATE, delay=2), 8, "4 lanes do not divide over 8 GPUs"),
    ],
)
def test_what_cannot_be_cut_is_refused(spec, ranks, says):
    with pytest.raises(ModelError, match=says):
        build(spec, ranks)


@pytest.mark.parametrize(("delay", "layer"), [(3, 2), (5, 2)])
def test_an_output_cannot_arrive_before_it_was_made(delay, layer):
    with pytest.raises(ModelError, match=f"reduce_attention is DELAYED in layer {layer}: nothing"):
        lanes_of(LATE, delay=delay)
    assert lanes_of(LATE, delay=1).delay == 1


# ---- check ----


def change_stage(schedule, which, **changes):
    segments = tuple(
        Segment(g.name, g.repeat, tuple(replace(s, **changes) if s.name == which else s for s in g.stages))
        for g in schedule.segments
    )
    return replace(schedule, segments=segments)


def test_what_build_makes_is_accepted():
    soon = (Reduce.NOW,) + (Reduce.DELAYED,) * 4
    specs = (spec_of(), lanes_of(LATE, delay=2), lanes_of(soon, delay=1))
    for spec, ranks in zip(specs, (2, 4, 1), strict=True):
        check_schedule(build(spec, ranks))
        check_partition(default_partition(build(spec, ranks)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: change_stage(s, "o_proj", source="lost"), "o_proj: reads lost, which nothing"),
        (lambda s: change_stage(s, "o_proj", name="qkv_proj"), "share the name qkv_proj"),
        (lambda s: change_stage(s, "down_proj", weights=()), "down_proj: a matrix stage without"),
    ],
)
def test_a_broken_schedule_is_refused(change, says):
    with pytest.raises(ModelError, match=says):
        check_schedule(change(build(lanes_of(LATE, delay=2))))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"o_proj": None}, "o_proj: no tiling"),
        ({"gate_up_proj": Tiling(5)}, "gate_up_proj: a unit of 5 rows splits a"),
        ({"down_proj": Tiling(28)}, "down_proj: 2 units for 3 blocks"),
    ],
)
def test_a_partition_that_cannot_run_is_refused(change, says):
    good = default_partition(build(spec_of()))
    tilings = {name: t for name, t in (good.tilings | change).items() if t}
    with pytest.raises(ModelError, match=says):
        check_partition(Partition(good.schedule, good.num_blocks, tilings))


def test_an_owner_that_disagrees_with_its_block_is_refused():
    class Shifted(Partition):
        def owner(self, stage, layer, unit, rank=0):
            return (super().owner(stage, layer, unit, rank) + 1) % self.group_size(stage)

    good = default_partition(build(spec_of()))
    with pytest.raises(ModelError, match="qkv_proj: owner and block 0 disagree"):
        check_partition(Shifted(good.schedule, good.num_blocks, good.tilings))


# ---- GPUs ----


def test_a_gpu_is_found_by_its_short_and_its_driver_name():
    assert find_gpu("H200") is GPUS["h200"]
    assert find_gpu("NVIDIA H200") is GPUS["h200"]
    assert find_gpu("AMD Instinct MI300X OAM") is GPUS["mi300x"]
    assert find_gpu("NVIDIA H20") is GPUS["h20"] and find_gpu("NVIDIA H100 PCIe") is GPUS["h100-pcie"]
    for name in ("", "NVIDIA", "h2000", "NVIDIA H2000", "NVIDIA GeForce RTX 4090"):
        with pytest.raises(DeviceError, match="have h200, h100"):
            find_gpu(name)


def test_every_gpu_row_is_possible():
    for name, gpu in GPUS.items():
        assert gpu.name == name == name.lower() and gpu.vendor in ("nvidia", "amd")
        assert 0 < gpu.num_blocks <= gpu.num_sms and gpu.num_blocks % gpu.dies == 0
        assert gpu.shared_bytes < gpu.l2_bytes < gpu.memory_bytes and 5e11 < gpu.bandwidth < 2e13


def test_stages_are_of_known_kinds():
    ops = [stage.op for _, stage in build(lanes_of(LATE, delay=2)).walk()]
    assert ops.count(Op.MATVEC) == 5 and {Op.EMBED, Op.ATTENTION, Op.MIX, Op.SAMPLE} < set(ops)


def test_check_looks_at_every_layer():
    """A partition that forgets its rows from the fourth layer on is refused."""

    class Forgetful(Partition):
        def block_units(self, stage, layer, block, rank=0):
            units = super().block_units(stage, layer, block, rank)
            return units if layer < 3 else range(0)

    schedule = build(named_shape("llama-3.2-1b"))
    tilings = {s.name: Tiling(8) for s in matrix_stages(schedule)}
    check_partition(Partition(schedule, 8, tilings))
    with pytest.raises(ModelError, match="without exactly one owner in layer 3"):
        check_partition(Forgetful(schedule, 8, tilings))
