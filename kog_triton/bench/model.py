"""The model to measure: a checkpoint, or a published shape with random weights made on the device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kog_triton.backends import WeightSource
from kog_triton.backends.device import TORCH_DTYPES, gpu_of
from kog_triton.bench.record import ROUNDED
from kog_triton.checkpoint.folder import Checkpoint
from kog_triton.checkpoint.narrow_random import NarrowRandomWeights
from kog_triton.checkpoint.random_weights import RandomWeights
from kog_triton.cli.model import check_revision
from kog_triton.demo import checkpoint_path
from kog_triton.errors import DeviceError, RequestError
from kog_triton.model.shapes import named_shape, with_format
from kog_triton.model.spec import DTYPES, DType
from kog_triton.model.weight_format import FORMATS
from kog_triton.schedule.topology import check_device

SEED = 0  # of weights and of prompts


@dataclass(frozen=True)
class Model:
    """`weights` may be read any number of times: every engine makes its own copy from it."""

    name: str
    weights: WeightSource
    origin: str  # in words: where the weights come from

    def describe(self) -> dict[str, Any]:
        """The `model` part of a record."""
        spec = self.weights.spec
        return {
            "name": self.name,
            "family": spec.family,
            "num_parameters": spec.num_parameters,
            "num_lanes": spec.num_lanes,
            "dtype": spec.dtype.name.lower(),
            "weights": self.origin,
        }

    def prompt(self, count: int, index: int = 0) -> list[int]:
        """Random ids, the same for the same vocabulary and index; speed does not depend on which they are."""
        ids = np.random.default_rng(SEED + index).integers(0, self.weights.spec.vocab_size, count)
        return [int(i) for i in ids]

    def check_room(self, positions: int) -> None:
        limit = self.weights.spec.max_context
        if positions > limit:
            raise RequestError(
                f"{positions} positions do not fit the {limit} of {self.name}: "
                "choose a smaller depth, prompt or number of tokens"
            )


def open_model(
    model: str | None,
    shape: str | None,
    device: torch.device,
    dtype: str = "auto",
    format: str | None = None,
    revision: str | None = None,
) -> Model:
    """A named shape, a checkpoint folder or hub id, or the demo; ModelError if it cannot be opened.

    dtype   of its weights for every engine, a key of DTYPES; "auto": its own
    format  that the layers' matrices of a named shape are rounded to, a key of FORMATS
    """
    check_revision(model, revision)
    if format and not shape:
        raise RequestError("--weights makes random weights narrow: name a --shape")
    if shape:
        spec = named_shape(shape)
        spec = spec if dtype == "auto" else spec.replace(dtype=DTYPES[dtype])
        if format:
            narrow = NarrowRandomWeights(with_format(spec, FORMATS[format]), SEED, device)
            how = f"random, seed {SEED}, made on {device.type}, {ROUNDED}{format}"
            return Model(shape.lower(), narrow, how)
        weights = RandomWeights(spec, SEED, device)
        return Model(shape.lower(), weights, f"random, seed {SEED}, made on {device.type}")
    checkpoint: WeightSource = Checkpoint.open(model or checkpoint_path(), revision)
    if dtype != "auto":
        checkpoint = Retyped(checkpoint, DTYPES[dtype])
    return Model(Path(model).name if model else "demo", checkpoint, "checkpoint")


class Retyped:
    """A `WeightSource` whose weights are those of another in a type of ours."""

    def __init__(self, weights: WeightSource, dtype: DType) -> None:
        self.spec = weights.spec.replace(dtype=dtype, narrow=())
        self._weights = weights

    def load(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = self._weights.load(name)
        return weight.to(TORCH_DTYPES[self.spec.dtype])


def find_device(name: str) -> tuple[torch.device, str]:
    """Where peers and weights live, and the word for it that backends take.

    `name` is what was asked for, as --device says; DeviceError if there is no such device, or not here.
    """
    check_device(name)
    if name == "cpu" or (not name and not torch.cuda.is_available()):
        return torch.device("cpu"), name
    if not torch.cuda.is_available():
        raise DeviceError(f"device {name!r}: torch sees no GPU here; leave --device out")
    device = torch.device("cuda")
    gpu = gpu_of(device)
    if gpu is None or name not in ("", gpu.vendor, gpu.name):
        seen = torch.cuda.get_device_name()
        raise DeviceError(f"device {name!r}: torch sees {seen}; leave --device out")
    return device, name or gpu.vendor
