"""A narrow weight as backends take it: by its form, since no backend imports the code that reads checkpoints."""

from collections.abc import Callable
from typing import Protocol

import torch

from kog_triton.backends import WeightSource
from kog_triton.errors import ModelError
from kog_triton.model.weight_format import Code, WeightFormat, e2m1_in_half

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


def code_values(code: Code, stored: Tensor, zero: int = 0) -> Tensor:
    """Bytes [..., n] as what their codes stand for, float32 [..., codes]; of 4 bits the low half of a byte comes first.

    zero  the code of UINT4 that stands for zero
    """
    if code is Code.E4M3:
        return stored.view(torch.float8_e4m3fn).float()
    if code is Code.INT8:
        return stored.view(torch.int8).float()
    nibbles = torch.stack([stored & 15, stored >> 4], -1).flatten(-2)
    if code is Code.E2M1:
        return e2m1_in_half(nibbles.to(torch.int16)).view(torch.float16).float() * 2**14
    return (nibbles.view(torch.int8) - zero).float() if zero else nibbles.float()


LoadNarrow = Callable[[str], Narrow]  # a narrow weight by its canonical name, on the device


def load_narrow(weights: WeightSource, bring: Callable[[Tensor], Tensor], name: str) -> Narrow:
    """ModelError if the source has values of its weights, but no codes."""
    load = getattr(weights, "narrow", None)
    if load is None:
        raise ModelError(f"{name} is narrow, and {type(weights).__name__} has no codes of it")
    tensor: Narrow = load(name, bring)
    return tensor
