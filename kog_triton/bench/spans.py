"""Where a token goes, as a record keeps it: the profiler's figures of each span, with units in their names."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from kog_triton.profiling.analysis import Figure

NANOSECONDS = ("mean", "largest", "token", "weights", "critical")


def written(spans: Iterable[Figure]) -> list[dict[str, Any]]:
    """The `profile` of a row."""
    return [
        {f"{key}_ns" if key in NANOSECONDS else key: value for key, value in asdict(span).items()} for span in spans
    ]


def read(profile: Iterable[dict[str, Any]]) -> list[Figure]:
    """What `written` wrote."""
    return [Figure(**{key.removesuffix("_ns"): v for key, v in span.items()}) for span in profile]
