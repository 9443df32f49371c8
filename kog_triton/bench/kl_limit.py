"""How far a backend's logits may be from the fp32 reference's: a little more than the model's own type makes of them.

Random weights whose logits deviate by 6 are hard on 16 bits: on an H200 transformers in bf16 differ by a KL of 0.04 to
0.1 with some shapes, and hardly with others (benchmarks/results). So the limit is not one number: it is what
transformers in bf16 make of the same weights on the same positions, half as much again.
"""

import gc
from dataclasses import dataclass

import numpy as np
import torch

from kog_triton.backends import Backend, BackendOptions, WeightSource
from kog_triton.bench.check import compare
from kog_triton.bench.engines import BackendUnderTest
from kog_triton.bench.model import Retyped
from kog_triton.bench.peers import Setting
from kog_triton.bench.peers.transformers_model import TransformersPeer
from kog_triton.errors import DeviceError, first_line
from kog_triton.model.spec import DType

FACTOR = 1.5
LEAST = 0.02  # nats: a limit near zero would be of a model that rounding hardly touches
# Of a Laneformer, which transformers does not have: a hundred times what ours differ by (4e-5, benchmarks/results).
LANES = 0.005
# Of narrow weights, whose kernel rounds no weight: times as much as the kernel of 16-bit weights may be off.
UNPACKED = 1.1
LARGE, MOST_OF_LARGE = 7e9, 1e-3  # parameters, and nats whatever 16 bits make of so many
# A peer only shows that it runs the same model: its own rounding is its own affair. transformers differ by up to 0.1.
PEER = 0.25


@dataclass(frozen=True)
class KlLimit:
    """Nats, mean over positions, of our backends; `reason` says where it comes from."""

    backend: float
    reason: str


def kl_limit(weights: WeightSource, device: torch.device, ids: list[int], want: np.ndarray) -> KlLimit:
    """The limit for logits of `ids`, which the reference says are `want` [T, vocab].

    Without transformers, or memory for them, it is LEAST.
    """
    if weights.spec.num_lanes > 1:
        return KlLimit(LANES, "of models with lanes")
    setting = Setting(Retyped(weights, DType.BF16), device, len(ids))
    if why := TransformersPeer.absent(setting):
        return KlLimit(LEAST, f"the least: {why}")
    try:
        theirs = Plain(setting).logits(ids)
    except torch.OutOfMemoryError:
        return KlLimit(LEAST, "the least: no memory for transformers")
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    kl = float(compare(want, theirs)[1].mean())
    return KlLimit(max(FACTOR * kl, LEAST), f"{FACTOR:g} x transformers' {kl:.1e} in bf16")


def unpacked_kl_limit(
    weights: WeightSource, backend: type[Backend], options: BackendOptions, ids: list[int], want: np.ndarray
) -> KlLimit:
    """As `kl_limit`, of narrow weights: what a backend makes of their values in the model's own type, where that is
    rounded to 16 bits, and UNPACKED more."""
    large = weights.spec.num_parameters >= LARGE
    try:
        engine = BackendUnderTest(backend, Retyped(weights, weights.spec.dtype), options)
    except DeviceError as error:  # the backend is open already, of the narrow weights: no room for more
        if not large:
            raise
        return KlLimit(MOST_OF_LARGE, f"of 7 billion parameters and more; unpacked: {first_line(error)}")
    try:
        kl = float(compare(want, engine.logits(ids))[1].mean())
    finally:
        engine.close()
    reason = f"{UNPACKED:g} x its own {kl:.1e} on the unpacked weights"
    if large and UNPACKED * kl > MOST_OF_LARGE:
        return KlLimit(MOST_OF_LARGE, f"of 7 billion parameters and more, less than {reason}")
    return KlLimit(UNPACKED * kl, reason)


class Plain(TransformersPeer):
    how = "a forward pass"
