"""A checkpoint on disk: its spec, its defaults for generation, and its weights by canonical name.

    checkpoint = Checkpoint.open("meta-llama/Llama-3.2-1B")
    checkpoint.load("layers.3.q_proj")        # torch.Tensor [1, rows, cols], as `spec.shapes` says

Opening checks the name, shape and dtype of every tensor against the spec, from the headers alone; a
checkpoint that opens loads. Weights are read one tensor at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kog_triton.checkpoint.hub import model_folder
from kog_triton.checkpoint.tensor_files import StoredTensor, TensorFiles
from kog_triton.errors import ModelError, shown
from kog_triton.json_file import read_json
from kog_triton.model.config import Config
from kog_triton.model.families import read_spec, sources
from kog_triton.model.family import HARMLESS_SUFFIXES
from kog_triton.model.generation import read_generation
from kog_triton.model.spec import DType, ModelSpec

_DTYPES = {"F32": DType.F32, "BF16": DType.BF16, "F16": DType.F16}
_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class Weight:
    """Where one canonical tensor lies in the files."""

    stored_name: str
    shape: tuple[int, ...]  # canonical
    interleaved_rope: bool


@dataclass
class Checkpoint:
    """An opened checkpoint; a `WeightSource`.

    `spec.dtype` is what config.json asks for, or, where it does not say, how the embedding is
    stored; `load` returns tensors as they are stored. `generation` holds what
    generation_config.json gives, see `read_generation`.
    """

    folder: Path
    config: dict[str, Any]
    spec: ModelSpec
    generation: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    _files: TensorFiles = field(repr=False)
    _weights: dict[str, Weight] = field(repr=False)

    @classmethod
    def open(cls, path_or_hub_id: str | Path, revision: str | None = None) -> "Checkpoint":
        """Open a folder, or a model of the hub by its id; ModelError for whatever is wrong."""
        folder = model_folder(path_or_hub_id, revision)
        file = folder / "config.json"
        if not file.exists():
            raise ModelError(f"{file}: no such file: pass the folder of a Hugging Face checkpoint")
        config = read_json(file)
        spec = read_spec(config, str(file))
        ends = {name: config.get(name) for name in ("eos_token_id", "bos_token_id")}
        says = read_generation(ends, spec.vocab_size, str(file))
        generation: dict[str, Any] = {}
        if (folder / "generation_config.json").exists():
            file = folder / "generation_config.json"
            generation = read_generation(read_json(file), spec.vocab_size, str(file))
        files = TensorFiles(folder)
        weights = _match(spec, files, folder)
        if Config(config).dtype() is None:
            stored = files.stored[weights["embed"].stored_name]
            spec = spec.replace(dtype=_DTYPES[stored.dtype])
        return cls(
            folder=folder,
            config=config,
            spec=spec,
            generation=generation,
            eos_token_ids=generation.get("eos_token_id", says.get("eos_token_id", ())),
            bos_token_id=generation.get("bos_token_id", says.get("bos_token_id")),
            _files=files,
            _weights=weights,
        )

    def names(self) -> list[str]:
        """Canonical names of all weights, layer by layer."""
        return list(self._weights)

    def load(self, name: str) -> torch.Tensor:
        """One weight on the CPU, shaped as in `spec.shapes`, in its stored dtype.

        It may be a view of the mapped file: treat it as read-only. Query and key rows are in
        half-split RoPE order.
        """
        weight = self._weights.get(name)
        if weight is None:
            raise ModelError(f"{self.folder}: the model has no weight {shown(name)}")
        tensor = self._files.read(weight.stored_name).reshape(weight.shape)
        return half_split_rows(tensor, self.spec.head_dim) if weight.interleaved_rope else tensor


def half_split_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of every head from interleaved to half-split RoPE layout.

    `rows` is [lanes, heads * head_dim, ...]. Row 2k of a head becomes row k, row 2k + 1 becomes row
    k + head_dim / 2, so the pair that turned together still does. Queries and keys move alike,
    which leaves every score as it was.
    """
    pairs = rows.unflatten(1, (-1, head_dim // 2, 2))
    return pairs.transpose(2, 3).reshape(rows.shape)


def _match(spec: ModelSpec, files: TensorFiles, folder: Path) -> dict[str, Weight]:
    """Find every weight among the stored tensors; refuse the missing, misshapen and left over."""
    where, unused, weights = sources(spec), set(files.stored), {}
    for name, pattern, layer, shape in _canonical(spec):
        source = where[pattern]
        stored_names = [n.format(layer) for n in source.names]
        stored_name = next((n for n in stored_names if n in files.stored), None)
        if stored_name is None:
            raise ModelError(f"{folder}: tensor {stored_names[0]!r} is missing")
        _check(stored_name, files.stored[stored_name], shape)
        unused.discard(stored_name)
        weights[name] = Weight(stored_name, shape, source.interleaved_rope)
    if spec.tied_embeddings and "lm_head.weight" in unused:
        _check_tied(files, weights["embed"].stored_name)
        unused.discard("lm_head.weight")
    unknown = sorted(n for n in unused if not n.endswith(HARMLESS_SUFFIXES))
    if unknown:
        raise ModelError(
            f"{files.stored[unknown[0]].file}: tensor {shown(unknown[0])} is not part of"
            f" a {spec.family} model with this config.json"
        )
    return weights


def _canonical(spec: ModelSpec) -> Iterator[tuple[str, str, int, tuple[int, ...]]]:
    """(name, pattern, layer, shape) of every weight, in the order of a forward pass."""
    shapes = spec.shapes
    layered = [p for p in shapes if "{}" in p]
    yield "embed", "embed", 0, shapes["embed"]
    for layer in range(spec.num_layers):
        for pattern in layered:
            yield pattern.format(layer), pattern, layer, shapes[pattern]
    for pattern in shapes:
        if "{}" not in pattern and pattern != "embed":
            yield pattern, pattern, 0, shapes[pattern]


def _check(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    wanted = shape[1:] if shape[0] == 1 and len(stored.shape) < len(shape) else shape
    if stored.shape != wanted:
        raise ModelError(
            f"{stored.file}: tensor {name!r} has shape {shown(list(stored.shape))},"
            f" config.json asks for {list(wanted)}"
        )
    if stored.dtype not in _DTYPES:
        raise ModelError(
            f"{stored.file}: tensor {name!r} is stored as {stored.dtype}:"
            " only BF16, F16 and F32 are supported"
        )


def _check_tied(files: TensorFiles, embed: str) -> None:
    """A tied checkpoint may repeat the embedding as lm_head; sampled rows tell if it does."""
    ours, head = files.stored[embed], files.stored["lm_head.weight"]
    rows = range(0, ours.shape[0], max(1, ours.shape[0] // _SAMPLED_ROWS))
    alike = (ours.shape, ours.dtype) == (head.shape, head.dtype)
    if not alike or not torch.equal(files.rows(embed, rows), files.rows("lm_head.weight", rows)):
        raise ModelError(
            f"{head.file}: tensor 'lm_head.weight' is not the embedding although the model is tied:"
            " set tie_word_embeddings to false in config.json"
        )
