"""Rotary position embedding as a table: every scaling rule is settled here, kernels only read numbers.

Formulas: RoFormer (arXiv 2104.09864); LLAMA3 scaling as published with Llama 3.1; YARN is arXiv 2309.00071.
"""

import math

import numpy as np

from kog_triton.model.spec import Rope, RopeScaling


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians by which a position rotates pair i, float64 [head_dim / 2]."""
    half = head_dim // 2
    freq = rope.theta ** (-np.arange(half, dtype=np.float64) / half)
    if rope.scaling is RopeScaling.LINEAR:
        return freq / rope.factor
    if rope.scaling is RopeScaling.LLAMA3:
        # Long waves are slowed by `factor`, short ones kept, and those between are blended.
        rotations = rope.original_context * freq / (2 * math.pi)  # over the original context
        blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return freq * (blend + (1 - blend) / rope.factor)
    if rope.scaling is RopeScaling.YARN:

        def pair_that_rotates(times: float) -> float:
            return half * math.log(rope.original_context / (times * 2 * math.pi)) / math.log(rope.theta)

        low, high = pair_that_rotates(rope.beta_fast), pair_that_rotates(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        ramp = np.clip((np.arange(half, dtype=np.float64) - low) / width, 0.0, 1.0)
        return freq * (1 - ramp) + freq / rope.factor * ramp
    return freq


def rope_table(rope: Rope, head_dim: int, num_positions: int) -> np.ndarray:
    """cos and sin of every position, float32 [num_positions, 2, head_dim / 2]."""
    angle = np.arange(num_positions, dtype=np.float64)[:, None] * inverse_frequencies(rope, head_dim)
    table = np.stack([np.cos(angle), np.sin(angle)], axis=1) * rope.attention_factor
    return table.astype(np.float32)
