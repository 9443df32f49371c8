"""Weights that a start reads once though two take them: the kernel's packing, and the library's second copy."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kog_triton.backends import BackendOptions, WeightSource
from kog_triton.backends.prefill.library import wants_library
from kog_triton.model.spec import ModelSpec

READ_BYTES = 4  # of a parameter in a file, at most
# Copies of the largest matrix: an allowance, not measured, for what packing it takes and torch's allocator keeps.
PACKING = 8


class ReadOnce:
    """A `WeightSource` on `device`: a tensor that one reader asks for stays there until a second one has it."""

    def __init__(self, weights: WeightSource, device: torch.device) -> None:
        self.spec = weights.spec
        self._weights, self._device = weights, device
        self._held: dict[str, torch.Tensor] = {}

    def load(self, name: str) -> torch.Tensor:
        """On the device; not to be written to."""
        if name in self._held:
            return self._held.pop(name)
        tensor: torch.Tensor = self._weights.load(name).to(self._device)
        self._held[name] = tensor
        return tensor

    def forget(self) -> None:
        self._held.clear()


@contextmanager
def read_once(
    weights: WeightSource, spec: ModelSpec, options: BackendOptions, device: torch.device
) -> Iterator[WeightSource]:
    """The weights for the opening of a backend that takes them twice, if its GPU has room for what is held
    meanwhile; else as they are. What was read by one reader alone is let go behind it.

    spec  as it runs: its dtype is that of both copies
    """
    if not (wants_library(options, device) and has_room(spec, options, device)):
        yield weights
        return
    once = ReadOnce(weights, device)
    try:
        yield once
    finally:
        once.forget()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # torch would keep it from other processes


def has_room(spec: ModelSpec, options: BackendOptions, device: torch.device) -> bool:
    """Whether `open_library` will find twice the kernel's copy free, which is what it asks for, beside what is held."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    positions = options.num_slots * (options.max_context or spec.max_context)
    table = spec.vocab_size * spec.hidden_size * spec.dtype.bytes
    packed = spec.num_parameters * spec.dtype.bytes + table
    taken = packed + positions * spec.kv_bytes_per_position + spec.num_parameters * READ_BYTES
    taken += PACKING * table
    return free - taken >= 2 * packed
