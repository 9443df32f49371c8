"""What kog_triton and its libraries keep on disk between runs, and where.

A backend names where it keeps compiled kernels under the entry point group `kog_triton.caches`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from kog_triton.cli.history import history_file

GROUP = "kog_triton.caches"  # name of a backend -> () -> Path


@dataclass(frozen=True)
class Cache:
    """One place. `path` is None for a user without a home; `variable` moves it."""

    name: str
    what: str
    path: Path | None
    variable: str
    ours: bool  # `kog cache clear` may empty it

    def files(self) -> list[tuple[Path, int]]:
        """Every file with its bytes, a link's own; none where there is no such place."""
        if self.path is None:
            return []
        if self.path.is_file():
            return [(self.path, self.path.stat().st_size)]
        found = []
        for folder, _, names in os.walk(self.path):
            for name in names:
                try:
                    found.append((Path(folder, name), os.lstat(Path(folder, name)).st_size))
                except OSError:  # gone meanwhile
                    continue
        return found


def caches() -> Iterator[Cache]:
    """Ours first."""
    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        try:
            path = entry.load()()
        except RuntimeError:  # no home
            path = None
        yield Cache(entry.name, f"compiled kernels of {entry.name}", path, "XDG_CACHE_HOME", True)
    yield Cache("history", "what was typed into --interactive", history_file(), "XDG_STATE_HOME", True)
    yield Cache("triton", "kernels that Triton compiled", _triton(), "TRITON_CACHE_DIR", False)
    yield Cache("hub", "models of the Hugging Face hub: hf cache ls, hf cache rm", _hub(), "HF_HOME", False)


def _triton() -> Path | None:
    said = os.environ.get("TRITON_CACHE_DIR")
    try:
        return Path(said) if said else Path.home() / ".triton" / "cache"
    except RuntimeError:
        return None


def _hub() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)
