"""Planted edits of a kernel's headers: a copy of an include folder in which one text is another."""

import shutil
from pathlib import Path

from tests.lib.cuda_walk import INCLUDE


def plant(folder: Path, *edits: tuple[str, str, str], source: Path = INCLUDE) -> Path:
    """A new include folder inside `folder`, CUDA's or that of `source`. Each edit is (header, before, after): `before`
    stands there once."""
    include = folder / "include"
    shutil.copytree(source, include)
    for header, before, after in edits:
        path = include / "kog" / header
        text = path.read_text()
        assert text.count(before) == 1, f"{header}: {before!r} stands there {text.count(before)}x"
        path.write_text(text.replace(before, after))
    return include
