"""A JSON file of a checkpoint as an object, or a ModelError of one line that names the file; and records as text."""

import json
from pathlib import Path
from typing import Any

from kog_triton.errors import ModelError, first_line, shown

MAX_JSON_BYTES = 64 << 20  # an index of a million tensors stays below; a mistake does not


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ModelError if it is missing, too large, malformed or no object."""
    try:
        if not path.is_file():
            raise ModelError(f"{path}: no such file")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB, not a model's JSON")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or 'I/O error'}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {shown(value)}")
    return value


def in_lines(value: Any, levels: int, depth: int = 0) -> str:
    """JSON whose objects and lists have an item a line, down to so many levels; what is deeper has no spaces."""
    if depth == levels or not value or not isinstance(value, dict | list):
        return json.dumps(value, separators=(",", ":"))
    inner = [in_lines(one, levels, depth + 1) for one in (value.values() if isinstance(value, dict) else value)]
    if isinstance(value, dict):
        inner = [f"{json.dumps(name)}: {text}" for name, text in zip(value, inner, strict=True)]
    first, last = "{}" if isinstance(value, dict) else "[]"
    lines = ",\n".join(" " * (depth + 1) + one for one in inner)
    return f"{first}\n{lines}\n{' ' * depth}{last}"
