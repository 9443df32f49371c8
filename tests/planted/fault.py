"""One planted fault."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """`before` becomes `after` in a file of the package, or of backends/cuda; `tests` must notice."""

    path: str
    before: str
    after: str
    tests: str
    what: str
    quick: bool = False


@dataclass(frozen=True)
class Drawn:
    """A change drawn at random (draw.py): `changed` is the whole file with it; any of `tests` must notice."""

    path: str
    line: int
    before: str
    changed: str
    tests: tuple[str, ...]
