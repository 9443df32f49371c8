"""The Triton backend: the portable megakernel, its memory, its launches and its mailbox."""

from kog_triton.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
