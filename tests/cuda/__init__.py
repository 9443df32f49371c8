"""The CUDA backend without a GPU: its source compiled by g++ and run as fibers, and its machine code."""
