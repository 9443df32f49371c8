"""Weights and where they come from: a folder of files, the hub, or a seed.

Imports nothing: hub.py is read where torch is not imported yet (precompile.py).
"""

MAX_TENSORS = 1 << 17  # of a file and of an index; no supported model has a hundredth of it
