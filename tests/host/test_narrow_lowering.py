"""Narrow weights in the CUDA lowering, proved from the packed streams alone, for sizes that divide by nothing."""

from dataclasses import replace

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.errors import ModelError
from kog_triton.model.shapes import named_shape
from kog_triton.model.spec import DType
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from kog_triton.plan import stream_bytes, weight_bytes, with_format
from kog_triton.schedule.check import check_lowering
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.lowering import PADDING
from kog_triton.schedule.narrow_packing import pack_narrow
from kog_triton.schedule.schedule import Epilogue, Op, build
from kog_triton.schedule.shards import canonical
from tests.lib.lowering_cases import H200, PROMPT, ArrayWeights, compare_stages, walker_of
from tests.lib.narrow_stream import NarrowWeights, matrices_of, narrow_fragments, narrow_spec, row_scales_of

FP8_FORMATS = {
    "block": FORMATS["fp8-block"],
    "block, bf16 scales": replace(FORMATS["fp8-block"], scale=Scale.BF16),
    "block of 12 rows": WeightFormat(Code.E4M3, 12, 64, Scale.F32),
    "channel": FORMATS["fp8-channel"],
    "tensor": WeightFormat(Code.E4M3, 0, 0, Scale.BF16),
    "int8 channel": FORMATS["int8-channel"],
    "int8 g32": WeightFormat(Code.INT8, 1, 32, Scale.F16),
    "int4 g32": FORMATS["int4-g32"],
    "int4 channel": WeightFormat(Code.UINT4, 1, 0, Scale.F32),
    "rows g32": WeightFormat(Code.E4M3, 1, 32, Scale.F16),
    "int4 g32, zero points": WeightFormat(Code.UINT4, 1, 32, Scale.F16, Offset.ZERO_POINT),
    "int8 g32, zero points": WeightFormat(Code.INT8, 1, 32, Scale.BF16, Offset.ZERO_POINT),
    "int4 g32, minimums": WeightFormat(Code.UINT4, 1, 32, Scale.F16, Offset.MINIMUM),
    "mxfp4": FORMATS["mxfp4"],
}
LONG_K = (384, 896, 4864, 8960, 18944)
ODD = {"hidden_size": 90, "intermediate_size": 166, "num_heads": 6, "num_kv_heads": 2, "head_dim": 22}


def fp8_sizes(how):
    return (
        ODD
        if how.group_rows != 1 or not how.group_cols
        else {"hidden_size": 96, "intermediate_size": 160, "num_heads": 4, "num_kv_heads": 2, "head_dim": 24}
    )


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_walker_reproduces_every_stage_from_the_packed_streams_alone(name):
    how = FP8_FORMATS[name]
    spec = narrow_spec(how, **fp8_sizes(how))
    source = NarrowWeights(spec, ArrayWeights(spec))
    walker, _ = walker_of(spec, 1, True, 12, source)
    reference = ReferenceBackend(source, BackendOptions())
    expected = reference.forward_logits(PROMPT)
    assert expected.std() >= 1
    kv = None
    for position, token in enumerate(PROMPT):
        logits, trace = walker.step(token, position)
        kv = compare_stages(reference, trace, token, kv)
        np.testing.assert_allclose(logits, expected[position], atol=2e-4 * expected.std() + 1e-5)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16])
@pytest.mark.parametrize("k", LONG_K)
def test_streams_hold_the_checkpoints_values_bit_for_bit(k, dtype):
    """down_proj and gate_up_proj of real lengths of K; 90 rows divide by nothing."""
    spec = narrow_spec(FORMATS["fp8-block"], **ODD | {"intermediate_size": k, "num_layers": 1}, dtype=dtype)
    assert_streams_hold_the_values(spec, NarrowWeights(spec, RandomWeights(spec)), 7)


def assert_streams_hold_the_values(spec, source, num_blocks):
    """Every weight of every block, once: codes by the kernel's rule, times the scales in the stream."""
    lowering = lower(build(spec), H200, num_blocks)
    check_lowering(lowering)
    for stage in lowering.schedule.layer_stages:
        if stage.op is not Op.MATVEC:
            continue
        parts = [source.narrow(canonical(stage, w, 0)) for w in stage.weights]
        values = np.concatenate([part.unpack().numpy()[0] for part in parts])
        (matrix,) = matrices_of(lowering.schedule, stage, parts)
        each, tiling = lowering.unit_fragments(stage), lowering.tilings[stage.name]
        seen = np.zeros(stage.rows, int)
        for block in range(lowering.num_blocks):
            rows = lowering.block_rows(stage, 0, block)
            (slots,) = pack_narrow(lowering, stage, 0, [block], 0, matrix)
            if not len(rows):
                continue
            got = np.concatenate([narrow_fragments(lowering, stage, slot) for slot in slots])
            units = len(rows) // tiling.unit_rows
            wide = got.shape[-1]
            got = got[: units * each].reshape(units, each, -1, tiling.k_parts, 8, wide)
            got = got.transpose(0, 2, 4, 3, 1, 5).reshape(len(rows), -1)
            if lowering.weights[stage.name].row_scales:
                (scales,) = row_scales_of(lowering.schedule, stage, parts)
                got = got * np.where(rows == PADDING, 0, scales[rows])[:, None]
            inside = rows != PADDING
            assert np.array_equal(got[inside, : stage.cols].astype(np.float32), values[rows[inside]])
            assert not got[inside, stage.cols :].any()
            seen[rows[inside]] += 1
        assert (seen == 1).all()


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-8b"])
@pytest.mark.parametrize("name", ["fp8-block", "fp8-channel"])
def test_a_token_reads_hardly_more_than_the_checkpoint_stores(shape, name):
    """Scales of blocks are repeated for fragments of eight rows: 0.8 % of the codes' bytes, of gate and up 1.6 %."""
    spec = with_format(named_shape(shape), FORMATS[name])
    lowering = lower(build(spec), H200)
    for segment, stage in lowering.schedule.walk():
        if stage.op is Op.MATVEC:
            stored = weight_bytes(lowering.schedule, stage, segment.repeat)
            most = 1.016 if stage.epilogue is Epilogue.SILU_MUL else 1.008
            read = stream_bytes(lowering, stage, segment.repeat)
            assert 0.995 * stored <= read <= most * stored


def test_what_the_stream_cannot_hold_is_refused():
    spec = narrow_spec(FORMATS["fp8-block"])
    mixed = spec.replace(narrow=spec.narrow[1:])
    with pytest.raises(ModelError, match=r"q_proj is 16 bits wide and .* is fp8 128x128: a kernel takes one"):
        lower(build(mixed), H200)
    short = WeightFormat(Code.UINT4, 1, 16, Scale.BF16)
    with pytest.raises(ModelError, match="it reads groups that 32 divides, not int4 g16"):
        lower(build(with_format(named_shape("llama-3.2-1b"), short)), H200)
    channel = WeightFormat(Code.INT8, 1, 0, Scale.BF16, Offset.ZERO_POINT)
    with pytest.raises(ModelError, match="does not read int8 channel weights with zero points or minimums"):
        lower(build(with_format(named_shape("llama-3.2-1b"), channel)), H200)
