"""What is refused, by its one line."""

from collections.abc import Callable

import pytest

from kog_triton.errors import KogError


def refusal(act: Callable[[], object]) -> str:
    """The text of the KogError that `act` raises."""
    with pytest.raises(KogError) as refused:
        act()
    text = str(refused.value)
    assert "\n" not in text
    return text
