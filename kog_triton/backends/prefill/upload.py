"""Numbers of the host into a tensor of a device, without waiting for what its stream still does.

A copy from pageable memory waits until the stream has come to it, and the host with it. Here it comes
from pinned memory, which torch keeps until the copy is done.
"""

import torch


def upload(values: torch.Tensor, to: torch.Tensor) -> None:
    """Copy `values`, which lie on the host, into `to` in the order of the current stream."""
    if to.device.type == "cuda":
        values = values.pin_memory()
    to.copy_(values, non_blocking=True)
