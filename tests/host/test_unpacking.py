"""Matrices come out of the packed arenas as they went in: rows as they are dealt out, padding left behind."""

import numpy as np
import pytest

from kog_triton.model.spec import DType
from kog_triton.schedule import triton
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.lowering import layer_matrices
from kog_triton.schedule.packing import first_ring_slots, fragment_places, pack_blocks, unit_places, unpack_stage
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import find_gpu
from kog_triton.schedule.triton import lower_tiles
from kog_triton.schedule.triton_packing import pack_tiles, unpack_tiles
from tests.lib.prefill_cases import SPECS
from tests.lib.real_shapes import real_shape

TINY = ("llama", "one key head, yarn", "lanes of all kinds")
REAL = ("qwen2.5-0.5b",)


def schedule_of(name):
    spec = SPECS[name].replace(dtype=DType.BF16) if name in SPECS else real_shape(name, 2)
    return build(spec)


def random_shards(schedule, stage, seed):
    shape = (schedule.num_shards, stage.rows, stage.cols)
    return np.random.default_rng(seed).integers(-(1 << 15), 1 << 15, shape, np.int16)


def dealt(stage, shards):
    """By its definition: gate and up of one output side by side."""
    if stage.name != "gate_up_proj":
        return shards
    gate, up = np.split(shards, 2, 1)
    return np.stack([gate, up], 2).reshape(shards.shape)


@pytest.mark.parametrize(("name", "num_blocks"), [(n, b) for n in TINY for b in (0, 5)] + [(n, 0) for n in REAL])
def test_cuda_matrices_come_out_as_they_went_in(name, num_blocks):
    schedule = schedule_of(name)
    lowering = lower(schedule, find_gpu("h200"), num_blocks * schedule.num_shards)
    layers = 2  # the blocks that take a unit more move on
    chunks = lowering.stream_ring_slots()
    arena = np.full((chunks, lowering.num_blocks, lowering.ring_slot_bytes // 2), 7, np.int16)
    first, at = first_ring_slots(lowering), np.zeros(lowering.num_blocks, int)
    kept = {}
    for layer in range(layers):
        for stage in layer_matrices(schedule):
            shards = random_shards(schedule, stage, layer)
            kept[stage.name, layer] = dealt(stage, shards)
            assert np.array_equal(first[stage.name, layer], at)
            for block in range(lowering.num_blocks):
                shard = lowering.shard(stage, block, 0)
                packed = pack_blocks(lowering, stage, layer, [block], 0, shards[shard])[0]
                packed = packed.reshape(len(packed), arena.shape[2])
                arena[at[block] : at[block] + len(packed), block] = packed
                at[block] += len(packed)
    for layer in range(layers):
        for stage in layer_matrices(schedule):
            units = unit_places(lowering, stage, layer, first[stage.name, layer])
            places = fragment_places(lowering, stage, units)
            got = unpack_stage(lowering, stage, arena, places)
            assert np.array_equal(got, kept[stage.name, layer]), (stage.name, layer)


@pytest.mark.parametrize("sizes", [{"intermediate_size": 48}, {"hidden_size": 352, "intermediate_size": 1056}])
@pytest.mark.parametrize("name", ["llama", "lanes at once"])
def test_triton_matrices_come_out_as_they_went_in(name, sizes, monkeypatch):
    """Also rows in tiles of several widths."""
    monkeypatch.setattr(triton, "NARROW_COST", 0)  # small models have them, too
    schedule = build(SPECS[name].replace(dtype=DType.BF16, **sizes))
    tiles = lower_tiles(schedule, 3 * schedule.num_shards, 64, "cpu")
    assert any(len(stage.runs) > 1 for stage in tiles.stages) == ("hidden_size" in sizes)
    for stage, tiling in zip(layer_matrices(schedule), tiles.stages, strict=False):
        shards = random_shards(schedule, stage, 0)
        packed = pack_tiles(stage, tiling, tiles.group, shards)
        assert np.array_equal(unpack_tiles(stage, tiling, tiles.group, packed), dealt(stage, shards)), stage.name
