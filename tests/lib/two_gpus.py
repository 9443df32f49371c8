"""Tests that want two GPUs which reach each other's memory."""

import pytest

from kog_triton.backends.cuda.gpus import check_peers
from kog_triton.errors import DeviceError


def skip_without_two() -> None:
    try:
        check_peers(2)
    except DeviceError as error:
        pytest.skip(str(error))
