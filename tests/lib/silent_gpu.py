"""What a backend is to do once its GPU has fallen silent."""

import pytest

from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.recording import Profiler
from kog_triton.errors import DeviceError


def assert_shut(backend):
    """No entry point works any more, and each says what to do."""
    entry_points = [
        lambda: backend.generate(Mailbox()),
        lambda: backend.forward_logits([1, 2]),
        lambda: backend.run_stage("embed", 0, {}),
        lambda: backend.time_stage("embed", 0, {}, lambda: None),
    ]
    if isinstance(backend, Profiler):
        entry_points.append(lambda: backend.profile([1, 2], 1))
    for entry_point in entry_points:
        with pytest.raises(DeviceError, match=r"^the GPU fell silent .* open a new LLM or,[^\n]*$"):
            entry_point()
