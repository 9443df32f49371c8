"""The rotation table equals transformers' own rotary embedding, for every kind of scaling."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kog_triton.model.spec import Rope, RopeScaling
from kog_triton.schedule.rope import inverse_frequencies, rope_table

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# name -> (ours, transformers' rope_parameters)
CASES = {
    "default": (Rope(5e5), {"rope_type": "default", "rope_theta": 5e5}),
    "linear": (Rope(1e4, RopeScaling.LINEAR, 2.5), {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}),
    "llama3": (
        Rope(5e5, RopeScaling.LLAMA3, original_context=8192, **LLAMA3),
        {"rope_type": "llama3", "rope_theta": 5e5, "original_max_position_embeddings": 8192} | LLAMA3,
    ),
    "yarn": (
        Rope(1e6, RopeScaling.YARN, 4.0, 512, attention_factor=0.1 * math.log(4) + 1),
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "yarn, untruncated": (
        Rope(1e4, RopeScaling.YARN, 8.0, 256, beta_fast=20.0, beta_slow=2.0, attention_factor=1.25, truncate=False),
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 20.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
            "truncate": False,
        },
    ),
}


@pytest.mark.parametrize("head_dim", [64, 96, 6])
@pytest.mark.parametrize("case", CASES)
def test_table_equals_transformers(case, head_dim):
    rope, parameters = CASES[case]
    factor = parameters.get("factor", 1.0)
    context = int(parameters.get("original_max_position_embeddings", 512) * factor)
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=context,
        rope_parameters=parameters,
    )
    theirs = LlamaRotaryEmbedding(config)
    frequencies = inverse_frequencies(rope, head_dim)
    np.testing.assert_allclose(frequencies, theirs.inv_freq.double().numpy(), rtol=3e-6)
    count = 300
    cos, sin = theirs(torch.zeros(1, 1), torch.arange(count)[None])
    table = rope_table(rope, head_dim, count)
    assert table.shape == (count, 2, head_dim // 2) and table.dtype == np.float32
    # They turn in float32, so a position p is off by about p * 2^-24 * frequency.
    for ours, half in ((table[:, 0], cos), (table[:, 1], sin)):
        np.testing.assert_allclose(ours, half[0, :, : head_dim // 2].numpy(), atol=1e-4)


def test_a_pair_turns_by_its_frequency_at_every_position():
    """Also far out, where a float32 angle would be off by whole radians' fractions."""
    position, pair, head_dim = 100_000, 3, 64
    angle = position * 5e5 ** (-2 * pair / head_dim)
    cos, sin = rope_table(Rope(5e5), head_dim, position + 1)[position, :, pair]
    assert (cos, sin) == pytest.approx((math.cos(angle), math.sin(angle)), abs=1e-6)
