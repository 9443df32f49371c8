"""What a backend is to do once its GPU has fallen silent."""

import pytest

from kog_triton.backends.mailbox import Mailbox
from kog_triton.backends.recording import Profiler
from kog_triton.errors import DeviceError


def assert_shut(backend):
    """No door opens any more, and each says what to do."""
    doors = [
        lambda: backend.generate(Mailbox()),
        lambda: backend.forward_logits([1, 2]),
        lambda: backend.run_stage("embed", 0, {}),
        lambda: backend.time_stage("embed", 0, {}, lambda: None),
    ]
    if isinstance(backend, Profiler):
        doors.append(lambda: backend.profile([1, 2], 1))
    for door in doors:
        with pytest.raises(DeviceError, match=r"^the GPU fell silent .* open a new LLM or,[^\n]*$"):
            door()
