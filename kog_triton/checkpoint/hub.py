"""A model of the Hugging Face hub as a local folder: only files that are read are fetched.

Nothing is downloaded for a path that exists. The cache, its location and access tokens are
huggingface_hub's own.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kog_triton.errors import ModelError, shown

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # which of several files holds what
_FILES = [
    "config.json",
    "generation_config.json",
    SINGLE,
    INDEX,
    "model-*.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
]
TOKENIZER_FILES = [n for n in _FILES if n.startswith(("tokenizer", "special_", "chat_", "addit"))]


def gguf_file(path_or_hub_id: str | Path) -> Path | None:
    """The path of a model that is one GGUF file, by its name; None if it is something else."""
    if not isinstance(path_or_hub_id, str | Path) or not str(path_or_hub_id).endswith(".gguf"):
        return None
    path = Path(path_or_hub_id).expanduser()
    return None if path.is_dir() else path


def model_folder(
    path_or_hub_id: str | Path,
    revision: str | None = None,
    cache: str | Path | None = None,
    files: Sequence[str] = _FILES,
) -> Path:
    """The folder of a checkpoint: a local path, or else "org/name" of the hub at `revision`.

    `cache` is where downloads are kept, None for huggingface_hub's own place; `files` are the patterns to fetch.

    ModelError if it is neither, or if the download fails.
    """
    if not isinstance(path_or_hub_id, str | Path):
        raise ModelError(f"the model is {shown(path_or_hub_id)}: pass a folder or a hub id")
    path = Path(path_or_hub_id).expanduser()
    text = str(path_or_hub_id)
    if not text:
        raise ModelError("the model has no name: pass a folder or a hub id")
    if revision is not None and path.exists():
        kind = "folder" if path.is_dir() else "file"
        raise ModelError(f"{text} is a local {kind}: it has no revision {revision!r}")
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{text} is a file: pass the folder that holds config.json, or a .gguf file")
    if not isinstance(path_or_hub_id, str) or not _HUB_ID.fullmatch(text):
        raise ModelError(f"{text}: no such folder, and not a hub id of the form org/name")
    return _download(text, revision, cache, files)


def local_file(path_or_hub_id: str | Path, name: str, revision: str | None = None) -> Path | None:
    """One file of a checkpoint that is here already; None if it is not. Nothing is fetched."""
    text, path = str(path_or_hub_id), Path(path_or_hub_id).expanduser()
    if text and path.is_dir():
        return path / name if (path / name).is_file() else None
    if path.exists() or not _HUB_ID.fullmatch(text):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(text, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _download(hub_id: str, revision: str | None, cache: str | Path | None, files: Sequence[str]) -> Path:
    # Imported here: it takes a while, and a local folder needs none of it.
    from huggingface_hub import snapshot_download

    try:
        where: dict[str, Any] = {} if cache is None else {"cache_dir": cache}
        where["revision"] = revision
        found = Path(snapshot_download(hub_id, allow_patterns=list(files), **where))
        if INDEX in files and (others := _others_of_index(found / INDEX)):
            snapshot_download(hub_id, allow_patterns=others, **where)
        return found
    except Exception as error:  # its kinds of errors differ between versions and transports
        if type(error).__name__ == "LocalEntryNotFoundError":
            raise ModelError(
                f"{hub_id}: no such folder, not fetched before, and the hub cannot be reached: "
                "is there a network? Or download it elsewhere and pass the folder"
            ) from error
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
        raise ModelError(
            f"{hub_id}: no such folder, and the hub did not give it ({reason}):"
            " download it elsewhere and pass the folder"
        ) from error


def _others_of_index(index: Path) -> list[str]:
    """Files with weights that an index names and _FILES does not; none if it is no index, which opening it tells."""
    try:
        files = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return []
    plain = (f for f in files if isinstance(f, str) and re.fullmatch(r"[\w.-]+\.safetensors", f))
    return sorted(f for f in plain if f != SINGLE and not f.startswith("model-"))
