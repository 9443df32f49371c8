"""Narrow weights in the Triton lowering's tiles, read back from the packed words alone by the rule of its kernel."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kog_triton.backends.triton.host.memory import arena_words
from kog_triton.backends.triton.host.narrow_tiles import pack_narrow_tiles, unpack_narrow_tiles
from kog_triton.backends.triton.kernel.matvec import begins as kernel_begins
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import ModelError
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from kog_triton.schedule.lowering import layer_matrices, row_order
from kog_triton.schedule.schedule import Epilogue, build
from kog_triton.schedule.shards import canonical
from kog_triton.schedule.triton import lower_tiles
from tests.lib.narrow_stream import NarrowWeights, narrow_spec

SIZES = {"hidden_size": 192, "intermediate_size": 640, "num_heads": 6, "num_kv_heads": 2, "head_dim": 32,
         "num_layers": 1}  # fmt: skip
ODD = SIZES | {"hidden_size": 100, "intermediate_size": 164}
CASES = {
    "fp8 blocks": (FORMATS["fp8-block"], ODD),
    "fp8 tensors": (WeightFormat(Code.E4M3, 0, 0, Scale.BF16), ODD),
    "int8 channels": (FORMATS["int8-channel"], ODD),
    "int8 g64, zero points": (WeightFormat(Code.INT8, 1, 64, Scale.F16, Offset.ZERO_POINT), SIZES),
    "int4 g32": (FORMATS["int4-g32"], SIZES),
    "int4 g64, zero points": (WeightFormat(Code.UINT4, 1, 64, Scale.F16, Offset.ZERO_POINT), SIZES),
    "int4 g32, minimums": (FORMATS["q4_1"], SIZES),
    "mxfp4": (FORMATS["mxfp4"], SIZES),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def value_of_code(code, stored, zero):
    """Of stored codes less `zero`, in float32."""
    if code is Code.E4M3:
        bits = (stored.astype(np.uint32) << 24).view(np.int32) >> 4
        return (bits & -0x78100000).view(np.float32) * np.float32(2.0**120)
    if code is Code.E2M1:
        return np.concatenate([E2M1, -E2M1])[stored]
    signed = stored.astype(np.int8) if code is Code.INT8 else (stored.astype(np.int8) ^ 8) - 8
    return signed.astype(np.float32) - zero


def rows_of(t, packed, group, warps):
    """[rows dealt out, values of K] of all blocks' tiles, where `begins`, `place` and `tile_words` say they are."""
    codes, bits = t.codes, t.codes.code.bits
    out = np.zeros((group, t.units, t.tile_rows, 2 * t.row_words), np.float32)
    for block in range(group):
        for tile in range(t.tiles):
            unit, k = t.place(tile)
            first, step = t.begins(k)
            at = group * (first + unit * step) + block * t.tile_words(k)
            words = packed[at : at + t.tile_words(k)]
            width, count = t.stored_width(k), codes.groups(t.widths[k])
            stored = np.zeros((t.tile_rows, width), np.int32)
            scales, zero = np.zeros((2, t.tile_rows, count), np.float32)
            beside, wide = words[t.tile_rows * width :].view(np.float32), min(width, 128)
            each = max(1, t.tile_rows // warps)  # rows of a warp
            for row in range(t.tile_rows):
                for word in range(width):  # a thread's run of K is four words of each line
                    thread, line = divmod(word // 4, width // wide)
                    stored[row, word] = words[row * width + line * wide + thread * 4 + word % 4]
                for n in range(count):
                    place = (row % min(t.tile_rows, warps) * count + n) * each + row // warps
                    scales[row, n] = beside[place]
                    if codes.zero_points:
                        zero[row, n] = beside[t.tile_rows * count + place]
            stored = stored.view(np.uint32)[..., None]
            stored = stored >> (bits * np.arange(32 // bits, dtype=np.uint32)) & ((1 << bits) - 1)
            stored = stored.reshape(t.tile_rows, count, -1)
            values = value_of_code(codes.code, stored, zero[..., None]) * scales[..., None]
            begin = 2 * t.first_word(k)
            out[block, unit, :, begin : begin + 2 * t.widths[k]] = values.reshape(t.tile_rows, -1)
    return out.reshape(-1, out.shape[-1])


@pytest.mark.parametrize("case", CASES)
def test_tiles_hold_the_checkpoints_values(case):
    """Bit for bit, but for minimums."""
    how, sizes = CASES[case]
    spec = narrow_spec(how, **sizes)
    source = NarrowWeights(spec, RandomWeights(spec))
    schedule = build(spec)
    tiles = lower_tiles(schedule, 5, 64)
    assert tiles.has_narrow_layers and not tiles.head_alike
    warps = tiles.sizes.warps
    for stage, t in zip(layer_matrices(schedule), tiles.stages, strict=False):
        parts = [source.narrow(canonical(stage, w, 0)) for w in stage.weights]
        packed = pack_narrow_tiles(stage, t, warps, tiles.group, parts).numpy()
        assert packed.size == tiles.group * t.words
        want = torch.cat([part.unpack().reshape(part.shape[-2:]) for part in parts]).numpy()
        if stage.epilogue is Epilogue.SILU_MUL:
            want = want[row_order(stage, stage.rows)]
        got = rows_of(t, packed, tiles.group, warps)
        # A minimum is as near as the zero point for it, in float32, over the largest code.
        near = 1e-5 * np.abs(want).max() if how.offset is Offset.MINIMUM else 0
        assert np.abs(got[: t.rows, : t.cols] - want).max() <= near, stage.name
        half = torch.from_numpy(got[: t.rows, : t.cols]).to(torch.bfloat16)
        unpacked = unpack_narrow_tiles(t, warps, tiles.group, torch.from_numpy(packed), torch.bfloat16)
        assert torch.equal(unpacked[0], half), stage.name
        assert not got[t.rows :].any() and not got[:, t.cols :].any()


def test_a_group_without_a_scale_is_its_minimum_whatever_its_codes_are():
    spec = narrow_spec(FORMATS["q4_1"], **SIZES)
    schedule = build(spec)
    tiles, stage = lower_tiles(schedule, 5, 64), schedule.stage("o_proj")
    whole = NarrowWeights(spec, RandomWeights(spec)).narrow("layers.0.o_proj")
    scales = whole.scales.clone()
    scales[..., ::2] = 0
    part = replace(whole, scales=scales)
    t, warps = tiles.stages[1], tiles.sizes.warps
    packed = pack_narrow_tiles(stage, t, warps, tiles.group, [part]).numpy()
    got, want = rows_of(t, packed, tiles.group, warps)[: t.rows, : t.cols], part.unpack().numpy()
    flat = np.repeat(scales.numpy() == 0, 32, -1).reshape(want.shape)
    assert np.array_equal(got[flat.reshape(got.shape)], want[flat])
    assert np.allclose(got, want.reshape(got.shape), atol=1e-5 * np.abs(want).max()) and flat.any()


def test_the_arena_holds_what_is_asked_for_where_a_small_head_begins():
    """By down_proj, as if for qkv_proj, of every block, whatever the head's own tiles are."""
    head = FORMATS["int4-g128"]
    spec = named_shape("qwen3-0.6b").replace(vocab_size=1000, narrow=(("embed", head),))
    schedule = build(spec)
    tiles = lower_tiles(schedule, 132, 64)
    first, before = tiles.stages[0], tiles.layer_words * tiles.num_layers
    ends = []
    for unit, k in map(first.place, range(first.ahead)):
        begin, step = kernel_begins(tiles, 0, k)
        ends.append(begin + unit * step + tiles.num_blocks * first.tile_words(k))
    assert max(ends) > tiles.head_words and arena_words(schedule, tiles) == before + max(ends)


@pytest.mark.parametrize("name", ["fp8-block", "int4-g128", "int8-channel", "int4-g128-zp"])
def test_a_token_reads_hardly_more_than_codes_and_a_float_a_group(name):
    how = FORMATS[name]
    schedule = build(with_format(named_shape("qwen3-8b"), how))
    tiles = lower_tiles(schedule, 128, 64)
    read = 4 * tiles.layer_words
    beside = 32 * (2 if how.offset else 1) / (how.group_cols or 2048)
    stored = sum(t.rows * t.cols for t in tiles.stages[:4]) * (how.code.bits + beside) / 8
    assert stored <= read <= 1.05 * stored  # qkv_proj's rows, 48 a block, may be read as 64


def test_what_tiles_cannot_hold_is_refused_by_name():
    for group in (16, 48):
        spec = narrow_spec(WeightFormat(Code.UINT4, 1, group, Scale.F16), **SIZES)
        with pytest.raises(ModelError, match=f"triton backend: it reads .*, not int4 g{group}"):
            lower_tiles(build(spec), 5, 64)
    for code, offset in ((Code.E4M3, Offset.ZERO_POINT), (Code.E2M1, Offset.MINIMUM)):
        spec = narrow_spec(WeightFormat(code, 1, 32, Scale.F16, offset), **SIZES)
        with pytest.raises(ModelError, match="zero points and minimums of whole numbers alone"):
            lower_tiles(build(spec), 5, 64)


def test_tiles_of_16_bits_are_as_they_were():
    tiles = lower_tiles(build(named_shape("llama-3.2-1b").replace(dtype=DType.BF16)), 128, 64)
    for t in tiles.stages:
        assert t.words == t.block_rows * t.row_words and not t.is_narrow and t.pack == 1
        assert all(t.tile_words(k) == t.tile_rows * t.widths[k] for k in range(t.k_tiles))
