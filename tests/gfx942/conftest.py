"""What every test of the HIP host's side has to keep."""

import pytest


@pytest.fixture(autouse=True)
def no_last_error():
    """No status stays behind as a thread's last error (tests/lib/fake_hip.py), which torch would raise as its own."""
    from tests.lib.fake_hip import LAST_ERRORS

    LAST_ERRORS.clear()
    yield
    assert not LAST_ERRORS
