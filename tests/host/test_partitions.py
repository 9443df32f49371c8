"""Who computes what: the layouts at full size, packing, owners, and what `check` refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kog_triton.errors import ModelError
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType
from kog_triton.schedule.check import check_lowering, check_partition
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.lowering import Partition, Tiling, matrix_stages
from kog_triton.schedule.schedule import build
from tests.lib.lowering_cases import H200
from tests.lib.ring_walker import spec_of


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", ["llama-3.2-1b", "laneformer-2b"])
def test_probe_layouts(shape, ranks):
    """The shapes that were measured: 128 blocks, padding of 1 % at most, ring slots of 12 to 24 KB, a deep ring."""
    spec = named_shape(shape)
    lowering = lower(build(spec, ranks), H200)
    check_lowering(lowering)
    assert lowering.num_blocks == 128
    assert lowering.ring_slot_bytes in (12288, 16384, 24576)
    assert lowering.ring_slots * lowering.ring_slot_bytes >= 160 * 1024
    real = 2 * (spec.num_parameters - (0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size))
    norms = 2 * spec.hidden_size * (2 * spec.num_layers + 1)
    padded = sum(lowering.stream_bytes(rank) for rank in range(ranks))
    assert real - norms <= padded <= 1.01 * real
    slots = {lowering.block_ring_slots(b) for b in range(128)}
    assert max(slots) <= 1.02 * min(slots)


@pytest.mark.parametrize(
    "shape, fragments, unrolled, streams",
    [
        ("llama-3.2-1b", 2, 0, True),
        ("laneformer-2b", 3, 0, True),
        ("qwen3-0.6b", 2, 0, False),
        ("qwen2.5-coder-1.5b", 2, 5, True),
        ("qwen3-8b", 2, 0, True),
    ],
)
def test_chunks_end_where_units_do_unless_the_ring_shrinks(shape, fragments, unrolled, streams):
    """As measured: 24 KB for the lanes alone, and more in flight wherever the stream sets the pace."""
    lowering = lower(build(named_shape(shape)), H200)
    stages = matrix_stages(lowering.schedule)
    assert (lowering.frag_k, lowering.fragments) == (32, fragments)
    assert sum(lowering.steps(s) % fragments > 0 for s in stages) == unrolled
    assert lowering.streams == streams
    in_flight = [n * lowering.ring_slot_bytes for n in (lowering.window_slots, lowering.calm_slots)]
    assert in_flight == ([{2: 65536, 3: 73728}[fragments], 49152] if streams else [49152, 32768])


def test_the_block_that_reads_most_says_whether_the_stream_sets_the_pace():
    whole = named_shape("qwen3-0.6b")
    spec = whole.replace(
        num_layers=1,
        hidden_size=1600,
        intermediate_size=2880,
        windows=whole.windows[:1],
        reduce_attention=whole.reduce_attention[:1],
        reduce_mlp=whole.reduce_mlp[:1],
    )
    lowering = lower(build(spec), H200)
    head = lowering.schedule.stage("lm_head")
    layer = [
        lowering.block_ring_slots(b) - lowering.stage_ring_slots(head, 0, lowering.group_index(head, b))
        for b in range(lowering.num_blocks)
    ]
    assert layer[0] < 2 * lowering.ring_slots < max(layer)
    assert lowering.streams


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen2.5-coder-1.5b", "qwen3-8b"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_other_shapes_lower_with_little_padding(shape, ranks):
    spec = named_shape(shape)
    lowering = lower(build(spec, ranks), H200)
    check_lowering(lowering)
    padded = sum(lowering.stream_bytes(rank) for rank in range(ranks))
    assert padded <= 1.09 * spec.bytes_per_token  # wide fragments, whose loop is twice as fast


@pytest.mark.parametrize("hidden, heads, kv_heads", [(5632, 44, 4), (5632, 44, 11), (7680, 60, 12), (6400, 50, 10)])
def test_warps_stage_the_part_of_x_that_they_multiply(hidden, heads, kv_heads):
    spec = spec_of(
        hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=128,
        intermediate_size=2 * hidden, vocab_size=32_000,
    )  # fmt: skip
    lowering = lower(build(spec), H200)
    staged = -(-hidden // (16 * lowering.frag_k)) * 16 * lowering.frag_k
    for stage in matrix_stages(lowering.schedule):
        if stage.source == "x":
            multiplied = lowering.padded_k(stage)
            assert multiplied <= staged
            assert multiplied == staged or lowering.tilings[stage.name].k_parts < 16


@pytest.mark.parametrize("high, hidden", [(8, 512), (4, 1536)])
def test_fragment_layout_is_the_stated_one(high, hidden):
    """Fragment (step) of warp (group, part) holds, row by row, as many K values of each."""
    spec = spec_of(hidden_size=hidden, intermediate_size=8960, num_heads=6)
    lowering = lower(build(spec), H200, 4 if high == 8 else 128)
    stage = lowering.schedule.stage("qkv_proj" if high == 8 else "down_proj")
    assert lowering.fragment(stage) == (high, 8 // high * lowering.frag_k)
    wide = lowering.fragment(stage)[1]
    from kog_triton.schedule.packing import pack_blocks

    w = np.arange(stage.rows * stage.cols, dtype=np.uint16).reshape(stage.rows, stage.cols)
    (slots,) = pack_blocks(lowering, stage, 0, [1], 0, w)
    tiling, rows = lowering.tilings[stage.name], lowering.block_rows(stage, 0, 1)
    flat = slots.reshape(-1, 16, high, wide)
    steps = lowering.steps(stage)
    for n, warp, row in ((0, 0, 0), (1, 3, 5 % high), (steps, 14, high - 1)):
        unit, step = divmod(n, steps)
        group, part = divmod(warp, tiling.k_parts)
        source = rows[unit * tiling.unit_rows + group * high + row]
        k = (part * steps + step) * wide
        np.testing.assert_array_equal(flat[n, warp, row], w[source, k : k + wide])


def test_packing_with_torch_equals_numpy():
    from kog_triton.schedule.packing import pack_blocks

    lowering = lower(build(spec_of()), H200, 12)
    for stage in matrix_stages(lowering.schedule):
        w = np.random.default_rng(1).integers(0, 2**15, (stage.rows, stage.cols)).astype(np.int16)
        for block in (0, 7):
            ours = pack_blocks(lowering, stage, 2, [block], 0, w)
            theirs = pack_blocks(lowering, stage, 2, [block], 0, torch.from_numpy(w))
            np.testing.assert_array_equal(ours, theirs.numpy())


# ---- owners ----


@pytest.mark.parametrize("layer", [0, 1, 200])
def test_blocks_with_a_unit_more_of_one_stage_have_one_less_of_another(layer):
    """Qwen2.5's o_proj and gate_up_proj give half of the blocks a unit more: not the same ones."""
    lowering = lower(build(named_shape("qwen2.5-coder-1.5b")), H200)
    read = {}
    for stage in matrix_stages(lowering.schedule)[:4]:
        size = lowering.group_size(stage)
        units = [lowering.block_units(stage, layer, place) for place in range(size)]
        assert sorted(u for own in units for u in own) == list(range(lowering.num_units(stage)))
        assert all(lowering.owner(stage, layer, u) == b for b in range(size) for u in units[b])
        read[stage.name] = np.array([len(own) for own in units]) * lowering.steps(stage)
    assert len(set(read["o_proj"])) == len(set(read["gate_up_proj"])) == 2
    assert len(set(read["o_proj"] + read["gate_up_proj"])) == 1


@pytest.mark.parametrize("blocks", [1, 3, 12, 132])
def test_remainders_rotate_over_layers(blocks):
    """No two blocks differ by more than one unit, summed over any number of layers."""
    schedule = build(spec_of(num_layers=40, hidden_size=280))
    partition = Partition(schedule, blocks, {s.name: Tiling(2) for s in matrix_stages(schedule)})
    check_partition(partition)
    stage = schedule.stage("down_proj")
    for depth in (1, 2, 7, 40):
        total = [sum(len(partition.block_units(stage, i, b)) for i in range(depth)) for b in range(blocks)]
        assert max(total) - min(total) <= 1


def test_check_finds_rows_without_owner():
    schedule = build(spec_of())
    tilings = {s.name: Tiling(8, 16, 16, 8) for s in matrix_stages(schedule)}

    class Broken(Partition):
        def block_units(self, stage, layer, block, rank=0):
            units = super().block_units(stage, layer, block, rank)
            return range(units.start, units.stop - 1) if block == 2 and units else units

    check_partition(Partition(schedule, 4, tilings))
    with pytest.raises(ModelError, match="without exactly one owner"):
        check_partition(Broken(schedule, 4, tilings))


def test_lowering_that_does_not_fit_is_refused():
    lowering = lower(build(spec_of()), H200, 12)
    with pytest.raises(ModelError, match="not resident"):
        check_lowering(replace(lowering, num_blocks=133))
    small = replace(H200, shared_bytes=48 * 1024)
    with pytest.raises(ModelError, match="shared memory"):
        check_lowering(replace(lowering, gpu=small))
    with pytest.raises(ModelError, match="float32"):
        lower(build(spec_of(dtype=DType.F32)), H200)
    with pytest.raises(ModelError, match="do not divide"):
        build(spec_of(), 4)
