"""Narrow weights that no training made: random ones, round to nearest, to measure a format without a checkpoint."""

import torch

from kog_triton.checkpoint.narrow import NarrowTensor
from kog_triton.checkpoint.quantizing import quantize
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.model.spec import ModelSpec


class NarrowRandomWeights:
    """A `WeightSource` of the random weights of `spec`, of which those that `spec.narrow` names are stored narrow.

    `narrow` gives them as they are stored, `load` their values, float32. Made anew at each call, on `device`.
    """

    def __init__(self, spec: ModelSpec, seed: int = 0, device: str | torch.device = "cpu") -> None:
        self.spec = spec
        self._wide = RandomWeights(spec, seed, device)
        self._formats = dict(spec.narrow)

    def narrow(self, name: str) -> NarrowTensor:
        """ModelError for a format that is not made here."""
        return quantize(self._wide.load(name), self._formats[name])

    def load(self, name: str) -> torch.Tensor:
        return self.narrow(name).unpack() if name in self._formats else self._wide.load(name)
