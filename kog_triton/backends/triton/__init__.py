"""The Triton backend: the portable megakernel (kernel/), and its memory, launches and mailbox (host/)."""

from kog_triton.backends.triton.host.backend import TritonBackend

__all__ = ["TritonBackend"]
