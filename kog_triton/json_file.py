"""A JSON file of a checkpoint as an object, or a ModelError of one line that names the file."""

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
