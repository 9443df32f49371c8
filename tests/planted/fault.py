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
