"""Weights and where they come from: a folder of files, the hub, or a seed.

Imports nothing: hub.py is read where torch is not imported yet (precompile.py).
"""
