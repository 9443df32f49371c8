"""A narrow weight as backends take it: by its form, since no backend imports the code that reads checkpoints."""

from collections.abc import Callable
from typing import Protocol

import torch

from kog_triton.backends import WeightSource
from kog_triton.errors import ModelError
from kog_triton.model.weight_format import WeightFormat

Tensor = torch.Tensor


class Narrow(Protocol):
    """A weight as a narrow checkpoint stores it (checkpoint/narrow.py)."""

    @property
    def format(self) -> WeightFormat: ...
    @property
    def codes(self) -> Tensor: ...
    @property
    def scales(self) -> Tensor: ...
    @property
    def offsets(self) -> Tensor | None: ...
    def scale_values(self) -> Tensor: ...


LoadNarrow = Callable[[str], Narrow]  # a narrow weight by its canonical name, on the device


def load_narrow(weights: WeightSource, bring: Callable[[Tensor], Tensor], name: str) -> Narrow:
    """ModelError if the source has values of its weights, but no codes."""
    load = getattr(weights, "narrow", None)
    if load is None:
        raise ModelError(f"{name} is narrow, and {type(weights).__name__} has no codes of it")
    tensor: Narrow = load(name, bring)
    return tensor
