"""The stored tensors of one linear module, and what a format finds in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from kog_triton.checkpoint.narrow import Bring, NarrowTensor, as_it_is
from kog_triton.checkpoint.tensor_files import StoredTensor
from kog_triton.errors import FileError, ModelError, shown
from kog_triton.model.weight_format import Scale, WeightFormat

ONE_VALUE = ((), (1,), (1, 1))  # shapes in which one scale a tensor is stored
SCALES = {"F32": Scale.F32, "BF16": Scale.BF16, "F16": Scale.F16, "F8_E8M0": Scale.E8M0}


class Files(Protocol):
    """Named tensors on disk: tensor_files.py's and gguf.py's."""

    stored: dict[str, StoredTensor]

    def read(self, name: str) -> torch.Tensor: ...
    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor: ...
    def forget(self) -> None: ...


@dataclass
class Module:
    """The tensors `NAME.weight`, `NAME.scales` and so on, by what follows the module's name.

    `shape` is what config.json asks of the weight: (rows, cols), or (lanes, rows, cols).
    """

    files: Files
    name: str
    shape: tuple[int, ...]
    used: list[str] = field(default_factory=list)  # stored names that were taken
    bring: Bring = as_it_is  # to where codes are unpacked

    def has(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self.files.stored

    def dtype(self, suffix: str) -> str:
        return self.files.stored[f"{self.name}.{suffix}"].dtype

    def stored_shape(self, suffix: str) -> tuple[int, ...]:
        return self.files.stored[f"{self.name}.{suffix}"].shape

    def take(self, suffix: str, shape: tuple[int, ...], *dtypes: str) -> str:
        """Check that a tensor is there, with this shape and one of these types; its type."""
        name = f"{self.name}.{suffix}"
        stored = self.files.stored.get(name)
        if stored is None:
            raise self.error(f"tensor {shown(name)} is missing beside it")
        if stored.shape != shape:
            raise ModelError(
                f"{stored.file}: tensor {shown(name)} has shape {shown(list(stored.shape))},"
                f" config.json asks for {list(shape)}"
            )
        if stored.dtype not in dtypes:
            raise ModelError(
                f"{stored.file}: tensor {shown(name)} is stored as {stored.dtype}: it must be {' or '.join(dtypes)}"
            )
        self.used.append(name)
        return stored.dtype

    def take_scale(self, suffix: str, shape: tuple[int, ...], *dtypes: str) -> Scale:
        return SCALES[self.take(suffix, shape, *(dtypes or ("F32", "BF16", "F16")))]

    def ignore(self, *suffixes: str) -> list[str]:
        """Count tensors as used that are not read; those that are there."""
        found = [s for s in suffixes if self.has(s)]
        self.used += [f"{self.name}.{s}" for s in found]
        return found

    def read(self, suffix: str) -> torch.Tensor:
        tensor = self.files.read(f"{self.name}.{suffix}")
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            tensor = tensor.view(torch.uint8)
        return self.bring(tensor)

    def matrix(self) -> tuple[int, int]:
        """(rows, cols) of a weight that is one matrix."""
        if len(self.shape) != 2:
            raise self.error("this format holds no lanes")
        return self.shape[0], self.shape[1]

    def check_columns(self, how: WeightFormat) -> None:
        if reason := how.undivided(self.shape[-1]):
            raise self.error(reason)

    def error(self, what: str) -> ModelError:
        first = next((n for n in self.files.stored if n.startswith(self.name + ".")), None)
        file = self.files.stored[first].file if first else Path("the checkpoint")
        return ModelError(f"{file}: module {shown(self.name)}: {what}")


@dataclass(frozen=True)
class Found:
    """A narrow weight in the files: its format, the stored tensors it takes, and how to read it."""

    format: WeightFormat
    module: Module
    read: Callable[[Module], NarrowTensor]

    def load(self, bring: Bring) -> NarrowTensor:
        """Where `bring` takes the stored tensors; ModelError if the values contradict the format."""
        try:
            return self.read(replace(self.module, bring=bring))
        except FileError:
            raise
        except ModelError as error:
            raise self.module.error(str(error)) from None


class Scheme(Protocol):
    """How one checkpoint stores its narrow weights, as its config.json says.

    `notes` are what a user has to be told: what the checkpoint asks for and is not done. `harmless` are endings of
    tensors' names that are left alone.
    """

    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def harmless(self) -> tuple[str, ...]: ...

    def find(self, module: Module) -> Found | None:
        """The module's narrow weight; None if it is stored wide. ModelError for what does not fit."""
        ...
