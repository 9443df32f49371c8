"""The safetensors files of a folder as one set of named tensors, read one at a time.

    config.json
    model.safetensors                     or  model.safetensors.index.json + the shards it names

Opening reads headers only, and every header is checked by the safetensors library (sizes, offsets,
overlaps) and against the index. Data is memory-mapped: a tensor's bytes are read when it is used,
and never more than that tensor's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kog_triton.checkpoint import MAX_TENSORS
from kog_triton.checkpoint.hub import INDEX, SINGLE
from kog_triton.errors import ModelError, shown
from kog_triton.json_file import read_json

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a header describes it; `dtype` is the format's word: F32, BF16, I8, ..."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFiles:
    """`stored` describes every tensor of the folder by name; `read` gives one."""

    def __init__(self, folder: Path) -> None:
        self._handles: dict[Path, Any] = {}
        self.stored: dict[str, StoredTensor] = {}
        for file, expected in _files(folder).items():
            self._add(file, expected)

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored, a view of the mapped file: treat it as read-only."""
        file = self.stored[name].file
        try:
            return self._handles[file].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{file}: tensor {shown(name)} cannot be read: {_reason(error)}") from error

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """Some rows of a matrix, without touching the others."""
        part = self._handles[self.stored[name].file].get_slice(name)
        return torch.cat([part[i : i + 1] for i in indices])

    def forget(self) -> None:
        """Map the files anew: the pages that were read are given back, once no tensor is a view of them."""
        for file in self._handles:
            self._handles[file] = safe_open(file, framework="pt", device="cpu")

    def _add(self, file: Path, expected: set[str] | None) -> None:
        """Read one file's header; `expected` is what the index says, None without an index."""
        if not file.is_file():
            raise ModelError(f"{file}: missing: download the checkpoint again")
        try:
            handle = safe_open(file, framework="pt", device="cpu")
            names = set(handle.keys())
            if len(names) > MAX_TENSORS:
                raise ModelError(f"{file}: {len(names)} tensors: at most {MAX_TENSORS} are read")
            found = {name: _describe(file, handle, name) for name in names}
        except (SafetensorError, OSError, RuntimeError, ValueError) as error:
            raise ModelError(f"{file}: not a whole safetensors file ({_reason(error)}): download it again") from error
        if expected is not None and names != expected:
            name = min(names ^ expected)
            where = "in the file but not in" if name in names else "not in the file but in"
            raise ModelError(f"{file}: tensor {shown(name)} is {where} {INDEX}")
        self._handles[file] = handle
        self.stored |= found


def _reason(error: Exception) -> str:
    """What the library says, as part of a message of one line; it repeats names from the file."""
    line = " ".join(str(error).split())[:160]
    return "".join(c if c.isprintable() else "\ufffd" for c in line)


def _describe(file: Path, handle: Any, name: str) -> StoredTensor:
    part = handle.get_slice(name)
    return StoredTensor(file, tuple(part.get_shape()), part.get_dtype())


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files to open, each with the tensor names that the index expects in it."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    index = folder / INDEX
    if index.is_file():
        return {folder / name: names for name, names in _index(index).items()}
    for pattern in _PICKLED:
        pickled = next(folder.glob(pattern), None)
        if pickled is not None:
            raise ModelError(
                f"{pickled}: pickled weights are not loaded, they can run code:"
                " save the model as safetensors (transformers: model.save_pretrained(folder))"
            )
    raise ModelError(f"{folder}: neither {SINGLE} nor {INDEX}: download the weights too")


def _index(index: Path) -> dict[str, set[str]]:
    """An index as file name -> tensor names; only files beside the index are followed."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is {shown(weight_map)}: it must be a filled object")
    if len(weight_map) > MAX_TENSORS:
        raise ModelError(f"{index}: {len(weight_map)} tensors: at most {MAX_TENSORS} are read")
    out: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise ModelError(
                f"{index}: {shown(tensor)} lies in {shown(file)}: it must be the plain name of a .safetensors file"
            )
        out.setdefault(file, set()).add(tensor)
    return out


def _is_plain_name(file: str) -> bool:
    return (
        file.endswith(".safetensors") and len(file) <= 255 and file.isprintable() and not any(c in file for c in "/\\:")
    )
