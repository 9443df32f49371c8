"""Figures beside what is asked of them, as records keep them and commands print them."""

from typing import NamedTuple


class Asked(NamedTuple):
    """`limit` is the most that `found` may be, or the least."""

    what: str
    found: float
    limit: float
    at_least: bool = False

    @property
    def held(self) -> bool:
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def __str__(self) -> str:
        return f"{'held  ' if self.held else 'MISSED'} {self.what}: {self.found} ({self.limit})"


def by_name(every: list[Asked]) -> dict[str, dict[str, float | bool]]:
    """For a record."""
    return {a.what: {"found": a.found, "limit": a.limit, "held": a.held} for a in every}
