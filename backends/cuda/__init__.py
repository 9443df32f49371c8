"""The CUDA backend: a hand-written monokernel for Hopper GPUs, its memory, its launches and its mailbox."""

from kog_triton.backends.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
