"""Records of tests as they lie in the tree: JSON, a row a line, in xz (`xz -dc` shows them)."""

import json
import lzma
from pathlib import Path
from typing import Any

from kog_triton.json_file import in_lines

DEPTH = 2  # of what has a line


def text_of(path: Path) -> str:
    return lzma.decompress(path.read_bytes()).decode()


def read(path: Path) -> Any:
    return json.loads(text_of(path))


def lines(value: Any) -> str:
    return in_lines(value, DEPTH) + "\n"


def write(path: Path, value: Any) -> None:
    path.write_bytes(lzma.compress(lines(value).encode(), preset=9 | lzma.PRESET_EXTREME))
