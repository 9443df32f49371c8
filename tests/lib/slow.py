"""Which cases of a test always run, and which with the slow tests (.ci/slow)."""

from collections.abc import Iterable
from typing import Any

import pytest


def some_always(cases: Iterable[Any], *always: Any) -> list[Any]:
    """Parameters of a test: a case that is in `always`, or a tuple whose first item is, runs always; others are slow.

    Raises:
        AssertionError: One of `always` is no case.
    """
    cases = list(cases)
    keys = [case[0] if isinstance(case, tuple) and case not in always else case for case in cases]
    missing = [name for name in always if name not in keys]
    assert not missing, f"no cases: {missing}"
    return [
        case if key in always else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case, key in zip(cases, keys, strict=True)
    ]
