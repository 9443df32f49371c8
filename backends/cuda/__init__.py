"""The CUDA backend: a hand-written monokernel for Hopper GPUs, its memory, its launches and its mailbox.

Imports nothing: its kernel's compiler begins before torch is imported (precompile.py).
"""
