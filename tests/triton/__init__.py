"""The Triton backend without a GPU: its kernels interpreted, and compiled for GPUs that are not there."""
