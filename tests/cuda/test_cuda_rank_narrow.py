"""Narrow weights of the CUDA kernels on several ranks, without a GPU: their own C++ as fibers against the reference on
the unpacked values, which walks the same ranks."""

import numpy as np
import pytest

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.errors import ModelError
from kog_triton.model.shapes import with_format
from kog_triton.model.spec import DType, Head
from kog_triton.model.weight_format import FORMATS, Code, Offset, Scale, WeightFormat
from kog_triton.schedule.cuda import lower
from kog_triton.schedule.schedule import build
from kog_triton.schedule.topology import GPUS
from tests.lib.cuda_rank_columns import RankColumnWalk, alone_on_ranks, assert_same
from tests.lib.cuda_ranks import RankWalk
from tests.lib.cuda_requests import PROMPTS, prompt_of, request, run, tokens_of
from tests.lib.cuda_walk import FiberBackend
from tests.lib.lowering_cases import ArrayWeights, mixed_lanes
from tests.lib.narrow_stream import NarrowWeights, narrow_spec
from tests.lib.slow import some_always

LARGE = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64,
         "num_layers": 2, "max_context": 64, "vocab_size": 104}  # fmt: skip
ODD = {"hidden_size": 90, "intermediate_size": 168, "num_heads": 6, "num_kv_heads": 2, "head_dim": 24, "num_layers": 2,
       "max_context": 64, "vocab_size": 102, "qkv_bias": True, "o_bias": True, "mlp_bias": True}  # fmt: skip
FP8, CHANNELS = FORMATS["fp8-block"], FORMATS["fp8-channel"]
AWQ = WeightFormat(Code.UINT4, 1, 32, Scale.F16, Offset.ZERO_POINT)
F16 = {"dtype": DType.F16}
CASES = {  # spec, ranks, blocks
    "fp8 blocks": (narrow_spec(FP8, **LARGE), 2, 3),
    "fp8 channels and head, odd sizes": (narrow_spec(CHANNELS, True, **ODD), 2, 2),
    "int4 g32, zero points, head, four ranks, two to a KV head": (
        narrow_spec(AWQ, True, **LARGE | F16 | {"num_kv_heads": 2}), 4, 2,
    ),
    "fp8 blocks and head": (narrow_spec(FP8, True, **LARGE | F16), 2, 2),
    "int8 channels, eight ranks": (narrow_spec(FORMATS["int8-channel"], **LARGE | F16), 8, 1),
    "mxfp4": (narrow_spec(FORMATS["mxfp4"], **LARGE | F16), 2, 2),
    "fp8 channels, lanes": (with_format(mixed_lanes(Head.SUM_THEN_NORM), CHANNELS), 2, 4),
}  # fmt: skip


def weights_of(spec):
    return NarrowWeights(spec, ArrayWeights(spec))


@pytest.mark.parametrize("name", some_always(CASES, *list(CASES)[:3]))
def test_logits_are_those_of_the_unpacked_values(name):
    spec, ranks, blocks = CASES[name]
    weights = weights_of(spec)
    walk = RankWalk(spec, weights, ranks, blocks)
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, 7).tolist()
    ours = walk.forward_logits(tokens)
    assert np.array_equal(ours, walk.forward_logits(tokens, seed=1))
    walked = ranks if spec.num_lanes == 1 else 1
    reference = ReferenceBackend(weights, BackendOptions(num_gpus=walked))
    expected = reference.forward_logits(tokens)
    assert expected.std() > 2
    assert np.sqrt(((ours - expected) ** 2).mean()) < (0.015 if spec.dtype is DType.F16 else 0.06)


def requests_of(columns):
    return [request(i, PROMPTS[i] * 2, 3) for i in range(columns)]


@pytest.mark.parametrize(
    ("name", "columns", "chunk"),
    [
        ("fp8 blocks", 4, False),
        pytest.param("fp8 channels and head, odd sizes", 2, False, marks=pytest.mark.slow),
        pytest.param("mxfp4", 8, False, marks=pytest.mark.slow),
        pytest.param("fp8 blocks", 8, True, marks=pytest.mark.slow),
    ],
)
def test_columns_and_chunks_have_the_bits_of_a_token_alone(name, columns, chunk):
    spec, ranks, blocks = CASES[name]
    weights = weights_of(spec)
    asked = [request(0, prompt_of(21), 1)] if chunk else requests_of(columns)
    expected = alone_on_ranks(RankWalk(spec, weights, ranks, blocks), asked)
    walk = RankColumnWalk(spec, weights, ranks, columns, blocks, chunk)
    assert_same(walk.serve(asked, seed=-7), expected)


def test_a_backend_on_two_gpus_serves_narrow_weights():
    spec, ranks, blocks = CASES["fp8 blocks"]
    weights = weights_of(spec)
    backend = FiberBackend(weights, BackendOptions(num_gpus=ranks), blocks)
    tokens = tokens_of(run(backend, request(0, PROMPTS[2]))[0])
    logits = backend.forward_logits([*PROMPTS[2], *tokens])
    assert tokens == logits[len(PROMPTS[2]) - 1 : -1].argmax(1).tolist()


@pytest.mark.parametrize(
    ("how", "sizes", "ranks", "words"),
    [
        (FP8, {"intermediate_size": 640}, 2,
         "groups of 128 fp8.* weights do not divide the 320 columns that each of 2 GPUs has of down_proj"),
        (FP8, {"head_dim": 16}, 2, "groups of 128 fp8.* the 64 columns that each of 2 GPUs has of o_proj"),
        (CHANNELS, {"intermediate_size": 510}, 2, "510 outputs of an FFN of fp8.* do not divide over 2 GPUs"),
    ],
)  # fmt: skip
def test_groups_that_gpus_would_cut_are_refused(how, sizes, ranks, words):
    spec = narrow_spec(how, **LARGE | sizes)
    with pytest.raises(ModelError, match=words):
        lower(build(spec, ranks), GPUS["h200"])
    lower(build(spec), GPUS["h200"])
