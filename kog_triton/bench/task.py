"""What every measurement of `kog bench` is told, and the bandwidth that it begins with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kog_triton.backends.choose import Choice
from kog_triton.bench import machine
from kog_triton.bench.bandwidth import measure_bandwidth
from kog_triton.bench.model import Model

Say = Callable[[str], None]  # told of each step, in a line


@dataclass(frozen=True, kw_only=True)
class Common:
    """The part of a task that all kinds share."""

    model: Model
    device: torch.device
    device_word: str  # as backends take it
    num_gpus: int
    rounds: int
    warmup: int
    backends: Sequence[Choice]

    def read_bandwidth(self, say: Say) -> dict[str, Any]:
        """What memory gives on this machine now, beside the datasheet's figure of a GPU that is known."""
        say("read bandwidth")
        gpu = machine.gpu_row() if self.device.type == "cuda" else None
        return measure_bandwidth(self.device, gpu, self.num_gpus)
