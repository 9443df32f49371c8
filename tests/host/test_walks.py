"""The reference's two walks are one function: walk="block", cut as a lowering cuts, equals walk="stage"."""

import numpy as np
import pytest
import torch

from kog_triton.backends import BackendOptions
from kog_triton.backends.reference import ReferenceBackend
from kog_triton.errors import RequestError
from kog_triton.model.spec import DType
from tests.lib.lowering_cases import MODELS, PROMPT, ArrayWeights


@pytest.mark.parametrize("name", MODELS)
def test_block_by_block_equals_stage_by_stage(name):
    spec, ranks = MODELS[name]
    weights = ArrayWeights(spec, seed=1)
    stage, block = (
        ReferenceBackend(weights, BackendOptions(num_gpus=ranks, walk=walk)).forward_logits(PROMPT)
        for walk in ("stage", "block")
    )
    assert stage.std() >= 1 and not np.array_equal(stage, block)
    np.testing.assert_allclose(block, stage, atol=1e-4 * stage.std())


@pytest.mark.parametrize("walk", ["stage", "block"])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("biases", 2),
        ("plain on 4", 2),
        ("plain on 4", 4),
        ("KV heads on 4", 2),
        ("KV heads on 4", 4),
        ("KV heads on 4", 8),
        ("one KV head on 8", 8),
        ("FFN padded on 4", 4),
    ],
)
def test_tensor_parallelism_is_the_same_function(name, ranks, walk):
    spec, _ = MODELS[name]
    weights = ArrayWeights(spec, seed=2)
    alone, together = (
        ReferenceBackend(weights, BackendOptions(num_gpus=n, walk=walk)).forward_logits(PROMPT) for n in (1, ranks)
    )
    np.testing.assert_allclose(together, alone, atol=1e-4 * alone.std())


def test_a_row_that_no_block_computes_shows():
    """Rows start as NaN, so a hole in the partition reaches the logits."""
    backend = ReferenceBackend(ArrayWeights(MODELS["llama"][0]), BackendOptions(walk="block"))
    block_rows = backend.partition.block_rows

    def without_last(stage, layer, block, rank=0):
        rows = block_rows(stage, layer, block, rank)
        return rows[:-1] if stage.name == "o_proj" and block == 1 else rows

    object.__setattr__(backend.partition, "block_rows", without_last)
    assert np.isnan(backend.forward_logits(PROMPT)).any()


def test_an_unknown_walk_is_refused():
    with pytest.raises(RequestError, match="walks stage or block"):
        ReferenceBackend(ArrayWeights(MODELS["llama"][0]), BackendOptions(walk="sideways"))


@pytest.mark.parametrize(("dtype", "size"), [("auto", 4), ("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_bytes_per_token_are_those_that_are_read(dtype, size):
    spec, _ = MODELS["llama"]
    backend = ReferenceBackend(ArrayWeights(spec), BackendOptions(dtype=dtype))
    held = backend.memory_bytes()["weights"]
    small = backend.spec.vocab_size * backend.spec.hidden_size * size  # embedding: one row is read
    matrices = backend.spec.bytes_per_token - backend.spec.hidden_size * size
    norms = (2 * spec.num_layers + 1) * spec.hidden_size * size
    assert matrices - norms == held - small
    backend.forward_logits(PROMPT)
    backend.forward(0, PROMPT, 0, last_only=True)
    keys = backend.kv._data[0][0]
    assert keys.dtype is torch.float32
    per_position = keys[:, :, :, 0].nbytes * spec.num_layers
    assert backend.spec.kv_bytes_per_position == per_position
    assert backend.gpu is None and weights_dtype(backend) is backend.spec.dtype


def weights_dtype(backend):
    names = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
    (dtype,) = {w.dtype for w in backend._weights.values()}
    return names[dtype]
