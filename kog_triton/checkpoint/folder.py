"""A checkpoint on disk: its spec, its defaults for generation, and its weights by canonical name.

    checkpoint = Checkpoint.open("meta-llama/Llama-3.2-1B")
    checkpoint.load("layers.3.q_proj")        # torch.Tensor [1, rows, cols], as `spec.shapes` says

Opening checks the name, shape and dtype of every tensor against the spec, from the headers alone; a
checkpoint that opens loads, but for narrow weights whose values contradict their format. Weights are read one tensor
at a time. A narrow weight (FP8, int8, int4, MXFP4; formats/ and gguf/) is in `spec.narrow`: `narrow` gives its codes
and scales, `load` its values.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kog_triton.checkpoint.formats import Files, Found, Module, Scheme, read_scheme, without_scheme
from kog_triton.checkpoint.gguf.config import gguf_config, gguf_sources
from kog_triton.checkpoint.gguf.file import Directory
from kog_triton.checkpoint.gguf.tensors import GgufTensors
from kog_triton.checkpoint.hub import gguf_file, model_folder
from kog_triton.checkpoint.narrow import Bring, NarrowTensor, as_it_is
from kog_triton.checkpoint.tensor_files import StoredTensor, TensorFiles
from kog_triton.errors import ModelError, shown
from kog_triton.json_file import read_json
from kog_triton.model.config import Config
from kog_triton.model.families import read_spec, sources
from kog_triton.model.families.unread import unread_fields
from kog_triton.model.family import HARMLESS_SUFFIXES, Source
from kog_triton.model.generation import read_generation, unread
from kog_triton.model.spec import DType, ModelSpec
from kog_triton.model.weight_format import WeightFormat

_DTYPES = {"F32": DType.F32, "BF16": DType.BF16, "F16": DType.F16}
_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class Weight:
    """Where one canonical tensor lies in the files."""

    stored_name: str
    shape: tuple[int, ...]  # canonical
    interleaved_rope: bool
    found: Found | None = None  # if it is narrow


@dataclass
class Checkpoint:
    """An opened checkpoint; a `WeightSource`.

    `spec.dtype` is what config.json asks for, or, where it does not say, how the embedding is
    stored; `load` returns tensors as they are stored. `generation` holds what
    generation_config.json gives, see `read_generation`. `notes` are lines that a user should read: what the checkpoint
    asks for and is not done. Of a GGUF file, `folder` is the file, `config` what its metadata say as a config.json, and
    `metadata` all of them.
    """

    folder: Path
    config: dict[str, Any]
    spec: ModelSpec
    generation: dict[str, Any]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    _files: Files = field(repr=False)
    _weights: dict[str, Weight] = field(repr=False)
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, Any] | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process opens it again."""
        return Checkpoint.open, (self.folder,)

    @classmethod
    def open(cls, path_or_hub_id: str | Path, revision: str | None = None) -> "Checkpoint":
        """Open a folder, a GGUF file, or a model of the hub by its id; ModelError for whatever is wrong."""
        gguf = gguf_file(path_or_hub_id)
        if gguf is not None and revision is None:
            return cls._open_gguf(gguf)
        folder = model_folder(path_or_hub_id, revision)
        file = folder / "config.json"
        if not file.exists():
            other = min(folder.glob("*.gguf"), default="a .gguf file")
            raise ModelError(f"{file}: no such file: pass the folder of a Hugging Face checkpoint, or {other}")
        config = read_json(file)
        scheme = read_scheme(config, str(file))
        spec = read_spec(without_scheme(config), str(file))
        ends = {name: config.get(name) for name in ("eos_token_id", "bos_token_id")}
        says = read_generation(ends, spec.vocab_size, str(file))
        generation: dict[str, Any] = {}
        ignored = unread_fields(without_scheme(config))
        if (folder / "generation_config.json").exists():
            file = folder / "generation_config.json"
            said = read_json(file)
            generation = read_generation(said, spec.vocab_size, str(file))
            ignored += unread(said)
        files = TensorFiles(folder)
        weights = _match(spec, files, folder, sources(spec), scheme)
        if Config(config).dtype() is None and weights["embed"].found is None:
            stored = files.stored[weights["embed"].stored_name]
            spec = spec.replace(dtype=_DTYPES[stored.dtype])
        return cls(
            folder=folder,
            config=config,
            spec=spec.replace(narrow=_narrow(weights)),
            generation=generation,
            eos_token_ids=generation.get("eos_token_id", says.get("eos_token_id", ())),
            bos_token_id=generation.get("bos_token_id", says.get("bos_token_id")),
            _files=files,
            _weights=weights,
            notes=(scheme.notes if scheme else ()) + ignored,
        )

    @classmethod
    def _open_gguf(cls, path: Path) -> "Checkpoint":
        directory = Directory(path)
        files = GgufTensors(directory)
        config = gguf_config(directory, files)
        spec = read_spec(config, str(path))
        says = read_generation(config, spec.vocab_size, str(path))
        where = gguf_sources(spec, directory.metadata["general.architecture"])
        weights = _match(spec, files, path, where, files)
        return cls(
            folder=path,
            config=config,
            spec=spec.replace(narrow=_narrow(weights)),
            generation={},
            eos_token_ids=says.get("eos_token_id", ()),
            bos_token_id=says.get("bos_token_id"),
            _files=files,
            _weights=weights,
            notes=files.notes,
            metadata=directory.metadata,
        )

    def names(self) -> list[str]:
        """Canonical names of all weights, layer by layer."""
        return list(self._weights)

    def load(self, name: str) -> torch.Tensor:
        """One weight on the CPU, shaped as in `spec.shapes`, in its stored dtype; a narrow one's values in float32.

        It may be a view of the mapped file: treat it as read-only. Query and key rows are in
        half-split RoPE order.
        """
        narrow = self.narrow(name)
        if narrow is not None:
            return narrow.unpack()
        weight = self._weight(name)
        tensor = self._files.read(weight.stored_name).reshape(weight.shape)
        return half_split_rows(tensor, self.spec.head_dim) if weight.interleaved_rope else tensor

    def narrow(self, name: str, bring: Bring = as_it_is) -> NarrowTensor | None:
        """One weight as codes and scales, shaped and ordered as `load` gives it; None if it is stored wide.

        `bring` gives a stored tensor elsewhere, such as on a GPU: codes are unpacked and checked there.
        """
        weight = self._weight(name)
        if weight.found is None:
            return None
        tensor = weight.found.load(bring).reshape(weight.shape)
        if not weight.interleaved_rope:
            return tensor
        rows = torch.arange(weight.shape[-2])[None]
        return tensor.take_rows(half_split_rows(rows, self.spec.head_dim)[0])

    def forget(self) -> None:
        """Give back the pages of the files that were read; views of them stay valid."""
        self._files.forget()

    def _weight(self, name: str) -> Weight:
        weight = self._weights.get(name)
        if weight is None:
            raise ModelError(f"{self.folder}: the model has no weight {shown(name)}")
        return weight


def half_split_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of every head from interleaved to half-split RoPE layout.

    `rows` is [lanes, heads * head_dim, ...]. Row 2k of a head becomes row k, row 2k + 1 becomes row
    k + head_dim / 2, so the pair that turned together still does. Queries and keys move alike,
    which leaves every score as it was.
    """
    pairs = rows.unflatten(1, (-1, head_dim // 2, 2))
    return pairs.transpose(2, 3).reshape(rows.shape)


def interleaved_rows(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of `half_split_rows`."""
    halves = rows.unflatten(1, (-1, 2, head_dim // 2))
    return halves.transpose(2, 3).reshape(rows.shape)


def _match(
    spec: ModelSpec, files: Files, folder: Path, where: Mapping[str, Source], scheme: Scheme | None
) -> dict[str, Weight]:
    """Find every weight among the stored tensors; refuse the missing, misshapen and left over."""
    unused, weights = set(files.stored), {}
    for name, pattern, layer, shape in _canonical(spec):
        source = where[pattern]
        stored_names = [n.format(layer) for n in source.names]
        found = _find_narrow(files, scheme, stored_names, shape)
        if found is not None:
            if source.interleaved_rope and found.format.group_rows > 1:
                raise found.module.error("its rows share scales, which their RoPE order does not allow")
            unused.difference_update(found.module.used)
            weights[name] = Weight(found.module.name, shape, source.interleaved_rope, found)
            continue
        stored_name = next((n for n in stored_names if n in files.stored), None)
        if stored_name is None:
            raise ModelError(f"{folder}: tensor {stored_names[0]!r} is missing{_instead(files, stored_names)}")
        _check(stored_name, files.stored[stored_name], shape)
        unused.discard(stored_name)
        weights[name] = Weight(stored_name, shape, source.interleaved_rope)
    if spec.tied_embeddings and "lm_head.weight" in unused:
        _check_tied(files, weights["embed"])
        unused.discard("lm_head.weight")
    harmless = (*HARMLESS_SUFFIXES, *(scheme.harmless if scheme else ()))
    unused -= _zero_biases(files, unused, weights)
    unknown = sorted(n for n in unused if not n.endswith(harmless))
    if unknown:
        raise ModelError(
            f"{files.stored[unknown[0]].file}: tensor {shown(unknown[0])} is not part of"
            f" a {spec.family} model with this config.json"
        )
    return weights


def _find_narrow(files: Files, scheme: Scheme | None, stored_names: list[str], shape: tuple[int, ...]) -> Found | None:
    """The weight in a narrow format, under the first of its names that is stored; None if that is wide, or a vector."""
    if scheme is None or len(shape) < 2 or not stored_names[0].endswith(".weight"):
        return None
    plain = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    for name in stored_names:
        found = scheme.find(Module(files, name.removesuffix(".weight"), plain))
        if found is not None or name in files.stored:
            return found
    return None


def _instead(files: Files, stored_names: list[str]) -> str:
    """What an error about a missing weight adds: codes that no scheme has read."""
    stems = [name.removesuffix("weight") for name in stored_names]
    codes = (stem + end for stem in stems for end in ("qweight", "weight_packed", "weight_blocks"))
    found = next((name for name in codes if name in files.stored), None)
    return f": {found!r} is there, which config.json does not say how to read" if found else ""


def _zero_biases(files: Files, unused: set[str], weights: Mapping[str, Weight]) -> set[str]:
    """Biases of zeros that writers of GPTQ add to narrow modules whose model has none."""
    names = {f"{w.stored_name}.bias" for w in weights.values() if w.found is not None} & unused
    return {name for name in names if not bool(files.read(name).any())}


def _narrow(weights: Mapping[str, Weight]) -> tuple[tuple[str, WeightFormat], ...]:
    return tuple((name, w.found.format) for name, w in weights.items() if w.found is not None)


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
            f"{stored.file}: tensor {name!r} has shape {shown(list(stored.shape))}, config.json asks for {list(wanted)}"
        )
    if stored.dtype not in _DTYPES:
        raise ModelError(
            f"{stored.file}: tensor {name!r} is stored as {stored.dtype}: only BF16, F16 and F32 are supported"
        )


def _check_tied(files: Files, embed: Weight) -> None:
    """A tied checkpoint may repeat a wide embedding as lm_head; sampled rows tell if it does."""
    name, head = embed.stored_name, files.stored["lm_head.weight"]
    ours = None if embed.found else files.stored[name]
    alike = ours is not None and (ours.shape, ours.dtype) == (head.shape, head.dtype)
    rows = range(0, head.shape[0], max(1, head.shape[0] // _SAMPLED_ROWS)) if alike else ()
    if not alike or not torch.equal(files.rows(name, rows), files.rows("lm_head.weight", rows)):
        raise ModelError(
            f"{head.file}: tensor 'lm_head.weight' is not the embedding although the model is tied:"
            " set tie_word_embeddings to false in config.json"
        )
